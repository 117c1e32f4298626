"""Recurrent layers with a state for each row: the gated delta rule, Mamba-2 (SSM), short convolutions.

delta_rule, state_space     the chunked form: any device, any width, no loop over tokens
recurrent_kernels           the recurrent form: GPU kernels, token by token
reference_layer             a gated delta rule layer in operations of MLX
fused_layer                 the same layer in three or four GPU kernels
gated_delta, mamba2, short_convolution     subclasses of mlx-lm's layers that use the above
"""
