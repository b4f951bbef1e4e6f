"""The engine for CUDA inputs."""
