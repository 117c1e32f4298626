#pragma once

#include <cstdlib>
#include <new>

#include "quantized.h"

namespace outrider {

// Memory that a thread keeps for its next call.
class Scratch {
public:
    float *floats(size_t count) { return reinterpret_cast<float *>(bytes(count * sizeof(float))); }

    void *bytes(size_t count) {
        if (count > size) {
            std::free(memory);
            size = (count + TOKEN_ALIGNMENT - 1) / TOKEN_ALIGNMENT * TOKEN_ALIGNMENT;
            memory = std::aligned_alloc(TOKEN_ALIGNMENT, size);
            if (!memory) {
                size = 0;
                throw std::bad_alloc();
            }
        }
        return memory;
    }

    Scratch() = default;
    Scratch(const Scratch &) = delete;
    ~Scratch() { std::free(memory); }

private:
    void *memory = nullptr;
    size_t size = 0;
};

}  // namespace outrider
