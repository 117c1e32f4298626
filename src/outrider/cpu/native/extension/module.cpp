// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cell_copies.h"
#include "cell_operations.h"
#include "decoder_layer.h"
#include "draft_head.h"
#include "huge_pages.h"
#include "low_rank.h"
#include "masks.h"
#include "matmul.h"
#include "primitive.h"
#include "quantized.h"
#include "recurrence.h"
#include "sampling.h"
#include "threads.h"
#include "top_two.h"

namespace nb = nanobind;

namespace {

void add_decoder_layers(nb::module_ &m) {
    using namespace outrider;
    using mlx::core::array;
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<const array &, const array &, const std::optional<array> &, int, int, const std::string &,
                      const std::optional<array> &>());
    nb::class_<LowRank>(m, "LowRank")
        .def(nb::init<>())
        .def(nb::init<const LowRank::Arrays &, const LowRank::Arrays &, const LowRank::Arrays &,
                      const LowRank::Arrays &>())
        .def("__call__", &LowRank::operator());
    nb::class_<RMSNorm>(m, "RMSNorm")
        .def(nb::init<const array &, float>())
        .def("__call__", &RMSNorm::operator());
    nb::class_<Attention>(m, "Attention")
        .def("__init__",
             [](Attention *self, const RMSNorm &norm, const Linear &q, const Linear &k, const Linear &v,
                const Linear &o, const std::optional<RMSNorm> &q_norm, const std::optional<RMSNorm> &k_norm,
                int num_heads, int num_kv_heads, int rope_dims, float scale, bool is_part) {
                 new (self) Attention(
                     {norm, q, k, v, o, q_norm, k_norm, num_heads, num_kv_heads, rope_dims, scale, is_part});
             })
        .def("__call__", &Attention::operator(), nb::arg("x"), nb::arg("buffers"), nb::arg("angles"), nb::arg("starts"),
             nb::arg("num_fed"), nb::arg("places"), nb::arg("has_blocks"), nb::arg("window"),
             nb::arg("adapters").none() = nb::none(), nb::arg("terms") = nb::make_tuple())
        .def("write_cells", &Attention::write_cells, nb::arg("x"), nb::arg("buffers"), nb::arg("angles"),
             nb::arg("starts"), nb::arg("num_fed"), nb::arg("places"), nb::arg("has_blocks"),
             nb::arg("adapters").none() = nb::none(), nb::arg("terms") = nb::make_tuple());
    nb::class_<MLP>(m, "MLP")
        .def("__init__", [](MLP *self, const RMSNorm &norm, const Linear &gate, const Linear &up,
                            const Linear &down, bool is_part) { new (self) MLP({norm, gate, up, down, is_part}); })
        .def("__call__", &MLP::operator(), nb::arg("x"), nb::arg("num_fed"), nb::arg("adapters").none() = nb::none(),
             nb::arg("terms") = nb::make_tuple());
    nb::class_<Layers>(m, "Layers")
        .def(nb::init<const std::vector<std::pair<Attention, MLP>> &>())
        .def("__call__", &Layers::operator(), nb::arg("x"), nb::arg("buffers"), nb::arg("angles"), nb::arg("starts"),
             nb::arg("num_fed"), nb::arg("places"), nb::arg("has_blocks"), nb::arg("windows"),
             nb::arg("adapters").none() = nb::none(), nb::arg("terms") = nb::make_tuple());
    nb::class_<RopeAngles>(m, "RopeAngles")
        .def(nb::init<const array &, float, float>())
        .def("__call__", &RopeAngles::operator());
    nb::class_<DraftHead>(m, "DraftHead")
        .def("__init__",
             [](DraftHead *self, const Linear &embedding, const RMSNorm &norm_of_embedding,
                const RMSNorm &norm_of_hidden, const Linear &fc, const Attention &attention, const MLP &mlp,
                const RopeAngles &angles, const RMSNorm &norm, const Linear &projection,
                const std::optional<array> &token_ids, bool is_embedding_first, bool recurses_after_norm) {
                 new (self) DraftHead({embedding, norm_of_embedding, norm_of_hidden, fc, attention, mlp, angles, norm,
                                       projection, token_ids, is_embedding_first, recurses_after_norm});
             })
        .def("__call__", &DraftHead::operator());
    m.def("num_buffer_copies", &num_buffer_copies);
}

}  // namespace

NB_MODULE(_outrider_cpu, m) {
    add_decoder_layers(m);
    m.def("quantized_matmul", &outrider::quantized_matmul);
    m.def("gather_quantized_matmul", &outrider::gather_quantized_matmul);
    m.def("quantized_embedding", &outrider::quantized_embedding);
    m.def("recurrence", &outrider::recurrence, nb::arg("queries").none(), nb::arg("keys"), nb::arg("values"),
          nb::arg("gates"), nb::arg("betas"), nb::arg("state"), nb::arg("counts").none(), nb::arg("is_delta_rule"));
    m.def("top_two", &outrider::top_two);
    m.def("mask_logits", &outrider::mask_logits);
    m.def("logprobs", &outrider::logprobs);
    m.def("sample", &outrider::sample, nb::arg("logits"), nb::arg("positions"), nb::arg("inverse_temperature"),
          nb::arg("seeds"), nb::arg("filters"), nb::arg("token_ids").none(), nb::arg("wants_margins"));
    m.def("copy_cells", &outrider::copy_cells);
    m.def("write_cells", &outrider::write_cells);
    m.def("attend_cells", &outrider::attend_cells);
    m.def("use_huge_pages", &outrider::use_huge_pages, nb::call_guard<nb::gil_scoped_release>());
    m.def("set_num_threads", &outrider::set_num_threads);
    m.def("instructions", []() { return std::string(outrider::instructions()); });
    m.def("interleaves", &outrider::interleaves);
    m.def("use_instructions", [](const std::string &wanted) { return outrider::use(wanted.c_str()); });
}
