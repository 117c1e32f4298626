// Prints what `amx_configure` loads for 6 to 16 tokens, a line for each. `ldtilecfg` needs a CPU with AMX: the test has
// replaced it by instructions that copy its operand to `loaded`.
#include <cstdio>

#include "quantized_avx512.h"

extern "C" {
unsigned char loaded[64];
}

int main() {
    for (int num_tokens = 6; num_tokens <= 16; num_tokens++) {
        outrider::amx_configure(num_tokens);
        for (unsigned char byte : loaded)
            std::printf("%02x", byte);
        std::puts("");
    }
}
