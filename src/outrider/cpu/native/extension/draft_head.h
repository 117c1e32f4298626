// The drafts of an MTP head with one layer, as one MLX primitive:
//
//     x      = fc(concat[norm(embed(next token)), norm(hidden)])       or hidden first
//     x      = mlp(attention(x)), with cells of its own                (decoder_layer.h)
//     out    = norm(x);  draft = the best token of projection(out)
//
// and again with this draft as the next token, and with x or out as hidden. To the bit what the operations give one by
// one (step/mtp.py). Of the tokens that the head is fed, only the newest one of each row is computed to the end: of the
// others nothing but keys and values is ever read. Rejected drafts are not computed at all.
#pragma once

#include <optional>
#include <vector>

#include "decoder_layer.h"
#include "mlx/mlx.h"

namespace outrider {

struct DraftHeadParts {
    Linear embedding;  // of the trunk; [vocab, hidden]
    RMSNorm norm_of_embedding, norm_of_hidden;
    Linear fc;
    Attention attention;
    MLP mlp;
    RopeAngles angles;
    RMSNorm norm;
    Linear projection;                          // onto the draft vocabulary
    std::optional<mlx::core::array> token_ids;  // int32 [draft vocabulary]; none: 0, 1, ..
    bool is_embedding_first, recurses_after_norm;
};

class DraftHead {
public:
    // Throws std::invalid_argument if the parts do not fit together.
    explicit DraftHead(DraftHeadParts parts);

    // hidden [rows, width, hidden]: the trunk's; next_ids [rows, width] int32: the token after each; starts [rows]: the
    // cell of each row's first token, positions [rows] its position; num_committed [rows]: tokens of each row that the
    // head is fed; all int32. buffers, places, window: as Attention has them. sampling: nothing if all rows take the
    // best token, or as `sample` has them: inverse temperatures, seeds, and maybe three filters.
    // Returns `depth` drafts [rows, depth] int32 and their margins [rows, depth] float32, unless depth is 0, and the new
    // buffers.
    std::vector<mlx::core::array> operator()(
        const mlx::core::array &hidden, const mlx::core::array &next_ids, const std::vector<mlx::core::array> &buffers,
        const mlx::core::array &starts, const mlx::core::array &positions, const mlx::core::array &num_committed,
        const mlx::core::array &places, bool has_blocks, int window, int depth,
        const std::vector<mlx::core::array> &sampling) const;

private:
    std::shared_ptr<const DraftHeadParts> parts;
};

}  // namespace outrider
