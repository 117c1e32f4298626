"""The product of CUDA's tensor cores, for bodies of kernels that set IS_BFLOAT (0: float16)."""

# sums [16, 8] += a [16, 16] * b [16, 8]. A lane holds four of the sums, eight numbers of a and four of b.
MULTIPLY = """
    auto multiply = [](float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if constexpr (IS_BFLOAT)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        else
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    };
"""
