// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "matmul.h"
#include "quantized.h"
#include "recurrence.h"
#include "threads.h"

namespace nb = nanobind;

NB_MODULE(_outrider_cpu, m) {
    m.def("quantized_matmul", &outrider::quantized_matmul);
    m.def("gather_quantized_matmul", &outrider::gather_quantized_matmul);
    m.def("recurrence", &outrider::recurrence, nb::arg("queries").none(), nb::arg("keys"), nb::arg("values"),
          nb::arg("gates"), nb::arg("betas"), nb::arg("state"), nb::arg("counts").none(), nb::arg("is_delta_rule"));
    m.def("set_num_threads", &outrider::set_num_threads);
    m.def("instructions", []() { return std::string(outrider::instructions()); });
    m.def("use_instructions", [](const std::string &wanted) { return outrider::use(wanted.c_str()); });
}
