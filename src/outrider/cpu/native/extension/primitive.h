// What MLX primitives for CPUs have in common: checks, inputs as plain memory, outputs in the memory of inputs.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace outrider {

inline void require(bool holds, const char *what) {
    if (!holds)
        throw std::invalid_argument(what);
}

class CpuPrimitive : public mlx::core::Primitive {
  public:
    using Primitive::Primitive;
    void eval_gpu(const std::vector<mlx::core::array> &, std::vector<mlx::core::array> &) override {
        throw std::runtime_error(std::string(name()) + " is for CPUs only");
    }

  protected:
    // Allocates the outputs. The work on them can be dispatched then.
    mlx::core::cpu::CommandEncoder &begin(const std::vector<mlx::core::array> &in, std::vector<mlx::core::array> &out);
};

// The elements of an input one after the other: the input's own memory, or a copy. Elements have four bytes.
const void *contiguous_data(mlx::core::cpu::CommandEncoder &encoder, const mlx::core::array &input);

template <class T>
const T *elements(mlx::core::cpu::CommandEncoder &encoder, const mlx::core::array &input) {
    return static_cast<const T *>(contiguous_data(encoder, input));
}

// Outputs that are inputs with changes, written in place. A primitive with several outputs calls in its eval_cpu first
// release_inputs, then take_over for each such output, and note_holds last.

// Each output of a primitive holds the inputs until it has been evaluated. From now on only the one that is being
// evaluated does, so that inputs can be taken over.
void release_inputs(const std::vector<mlx::core::array> &inputs, std::vector<mlx::core::array> &outputs);

// Gives an output the contents of an input: the input's own memory if nothing else uses it, or a copy.
void take_over(mlx::core::cpu::CommandEncoder &encoder, const mlx::core::array &input, mlx::core::array &output);

// MLX holds the outputs beside the one that is being evaluated until the work has been done. These holds do not keep a
// later primitive from taking over: its work comes after this one's.
void note_holds(
    mlx::core::cpu::CommandEncoder &encoder, const std::vector<mlx::core::array> &inputs,
    const std::vector<mlx::core::array> &outputs);

// The same for inputs that the primitive only reads.
void note_holds(mlx::core::cpu::CommandEncoder &encoder, const std::vector<mlx::core::array> &read);

// How many inputs have been copied because they could not be taken over.
long num_buffer_copies();

}  // namespace outrider
