"""What makes MLX fast on Linux CPUs. MLX's wheel brings a slow reference BLAS and a slow `exp`.

1. `blas` loads an OpenBLAS before MLX, so that MLX's float32 matmuls (`cblas_sgemm`) use it.
   `openblas_package` gives the pip package scipy-openblas32 the symbol names that MLX looks for.
2. `matmul` compiles native/sgemm.c, which computes matmuls of few tokens, and attention weights times values.
   It passes the others to OpenBLAS.
3. `matmul_check` checks both with small matrices before MLX uses them; `library_cache` stores their files.
4. `threads` decides how many threads a matmul gets while other processes use the cores.
5. `extension` compiles native/extension/, MLX operations in C++; `quantized` has the layers that use them,
   and `huge_pages` moves their weights into larger pages of memory.
6. `fused_layers` computes whole decoder layers with quantised weights as two such operations, `layer_runs`
   several layers as one, and `draft_head` all drafts of an MTP head. `native_parts` has what they share.
7. `layers` and `fast_math` replace attention, swiglu and rope in a loaded model (models/layer_swaps.py).
"""
