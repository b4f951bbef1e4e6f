"""Models written as a user of the package would write them, on the ops of `dsv4_compile.ops`."""
