"""Every private torch name this package relies on, by subject (torch 2.11 to 2.14).

`dispatch` ops and the dispatcher, `dynamo` what a trace leaves behind, `symbols` sizes, `inductor` compilers, `cuda`.
Nothing here may import Dynamo, Inductor or sympy at module level: `dsv4_compile` is imported before they are needed.
"""
