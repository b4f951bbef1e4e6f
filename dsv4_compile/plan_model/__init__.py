"""What a DeepSeek V4 model will take before a GPU is there: launches, memory, context, planned on fake tensors."""
