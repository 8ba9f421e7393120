"""What Triton writes for a GPU that this machine may lack."""

from __future__ import annotations


def compile_for_hopper(kernel, types: dict, constants: dict, **options) -> str:
    """Assembly of a kernel for compute capability 9; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [n for n, kind in types.items() if kind.startswith("*") or n.endswith("stride")]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
