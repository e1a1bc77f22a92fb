"""Kernels by what they are for, and waits by who waits."""

import pytest

from tests.nullcuda.causes import cause_of
from tests.nullcuda.tables import inside

ADD = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16> >"
SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16> >"


@pytest.mark.parametrize(
    "name, cause",
    [
        ("cublasLtMatmul", "products"),
        (
            "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<96, cutlass::bfloat16_t> >",
            "attention",
        ),
        ("triton_poi_fused_mul_silu_0", "compiled gates"),
        ("triton_poi_fused_add_cat_neg_0", "compiled kernels but gates"),
        ("memset", "fills"),
        (ADD, "additions"),
        (SUM, "bias sums and other sums"),
        ("a kernel without a name", "other"),
    ],
)
def test_a_name_says_what_a_kernel_is_for(name: str, cause: str) -> None:
    assert cause_of(name) == cause


def test_waits_in_micro_batches_are_told_by_who_waits() -> None:
    places = {
        "forward: cluster/transport/shared_memory.py:wait_for_transfers": 2,
        "backward: parallel/optim/zero.py:backward in deepspeed/accelerator/cuda_accelerator.py:synchronize": 1,
        "norm: parallel/optim/replicated.py:norm_sq": 1,
    }
    assert inside(places) == {"hand-over": 2, "DeepSpeed": 1}
