"""What a kernel is for, by its name."""

import re

# In this order: the first that fits.
CAUSES = (
    ("products", r"^cublas|^cudnn|gemm|gemv|splitKreduce|cutlass.*Kernel(?!_traits)"),
    ("attention", r"flash_|fmha|attention"),
    ("compiled gates", r"^triton_.*(silu|sigmoid)"),
    ("compiled kernels but gates", r"^triton_"),
    ("norms", r"layer_norm|rms_norm|GammaBeta|ComputeGrad|RowwiseMoments"),
    ("collectives", r"^nccl"),
    ("rotary, of plain operations", r"addcmul|gpu_kernel_impl(_nocast)?<at::native::BinaryFunctor<\w+(::\w+)?, .*MulF"),
    ("activations", r"silu|[gG]elu|sigmoid|tanh"),
    ("copies into gradient buckets", r"multi_tensor_apply_kernel.*Copy"),
    ("optimizer", r"multi_tensor_apply_kernel|[aA]dam"),
    ("casts and copies", r"copy_kernel|direct_copy|CatArray"),
    ("fills", r"^memset|FillFunctor"),
    ("bias sums and other sums", r"reduce_kernel|cub::.*reduce"),
    ("additions", r"CUDAFunctor_add|CUDAFunctorOnSelf_add"),
    ("multiplications", r"MulFunctor|div_true"),
    ("indexing and sorting", r"radix_sort|index|gather|scatter|scan|unique|segment|grad_weight|embedding|arange|cub::"),
)  # fmt: skip


def cause_of(name: str) -> str:
    """name: demangled, or of a library's call."""
    return next((cause for cause, pattern in CAUSES if re.search(pattern, name)), "other")
