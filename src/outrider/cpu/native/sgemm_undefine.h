/* Makes room for the next instruction set of sgemm.c. */

#undef EACH
#undef WIDTH
#undef NAME
#undef TARGET
#undef TOKENS
#undef UNPACKED
#undef CASES
#undef LANES
#undef VEC
#undef ZERO
#undef LOAD
#undef STORE
#undef SET
#undef ADD
#undef FMA
#undef MASK
#undef FIRST
#undef LOAD_FIRST
#undef STORE_FIRST
