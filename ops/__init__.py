"""Custom ops of DeepSeek V4 attention in the namespace `dsv4`, and the registry of roles.

One op a file, read in one order: schema, reference implementation, fake. Importing the package defines all of
them and registers their roles.
"""

if __name__ != "dsv4_compile.ops":
    # A second copy under another name would define every op of the library twice.
    raise ImportError("import this package as dsv4_compile.ops, not as ops")
