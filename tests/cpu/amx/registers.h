// Tile registers in memory, in the place of the compiler's intrinsics: for CPUs without AMX. What real ones refuse (sizes
// that do not fit, registers that are not configured) ends the program.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud

struct TileRegisters {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } sizes;
    uint8_t bytes[8][16][64];

    void require(bool is_true) const {
        if (!is_true) {
            std::fputs("sizes of tile registers\n", stderr);
            std::abort();
        }
    }

    void load_sizes(const void *from) {
        std::memcpy(&sizes, from, sizeof(sizes));
        std::memset(bytes, 0, sizeof(bytes));
        require(sizes.palette == 1 && sizes.start_row == 0);
        for (int i = 0; i < 16; i++)
            require(i < 8 ? sizes.rows[i] <= 16 && sizes.row_bytes[i] <= 64 : !sizes.rows[i] && !sizes.row_bytes[i]);
    }

    void load(int i, const void *from, ptrdiff_t stride) {
        require(sizes.rows[i] > 0);
        for (int row = 0; row < sizes.rows[i]; row++)
            std::memcpy(bytes[i][row], static_cast<const char *>(from) + row * stride, sizes.row_bytes[i]);
    }

    void store(int i, void *to, ptrdiff_t stride) const {
        require(sizes.rows[i] > 0);
        for (int row = 0; row < sizes.rows[i]; row++)
            std::memcpy(static_cast<char *>(to) + row * stride, bytes[i][row], sizes.row_bytes[i]);
    }

    // Signed bytes of `a` times unsigned bytes of `b`, four of each to a sum.
    void multiply(int sums, int a, int b) {
        require(sizes.rows[sums] == sizes.rows[a] && sizes.row_bytes[sums] == sizes.row_bytes[b]);
        require(sizes.row_bytes[a] == 4 * sizes.rows[b] && sizes.rows[a] > 0);
        for (int row = 0; row < sizes.rows[sums]; row++)
            for (int column = 0; column < sizes.row_bytes[sums]; column += 4) {
                int32_t sum;
                std::memcpy(&sum, &bytes[sums][row][column], 4);
                for (int k = 0; k < sizes.row_bytes[a]; k++)
                    sum += static_cast<int8_t>(bytes[a][row][k]) * bytes[b][k / 4][column + k % 4];
                std::memcpy(&bytes[sums][row][column], &sum, 4);
            }
    }
};

inline thread_local TileRegisters tile_registers;

#define _tile_loadconfig(from) tile_registers.load_sizes(from)
#define _tile_release() ((void)std::memset(&tile_registers, 0, sizeof(tile_registers)))
#define _tile_zero(i) std::memset(tile_registers.bytes[i], 0, sizeof(tile_registers.bytes[i]))
#define _tile_loadd(i, from, stride) tile_registers.load(i, from, stride)
#define _tile_stored(i, to, stride) tile_registers.store(i, to, stride)
#define _tile_dpbsud(sums, a, b) tile_registers.multiply(sums, a, b)
