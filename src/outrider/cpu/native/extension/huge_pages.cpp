#include "huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <map>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1 and later
#endif
#endif

namespace outrider {

namespace mx = mlx::core;

#ifdef __linux__
namespace {

constexpr uintptr_t PAGE = 2 << 20;  // bytes of a huge page
constexpr uintptr_t AT_ONCE = 32 * PAGE;  // bytes of one system call: between two of them the time is checked
constexpr int MAX_FAILURES = 8;  // in a row, after which no further page is tried; chosen by hand
// A page takes half a millisecond, or 2.4 where a virtual machine first has to get the memory from its host. A
// large model must not start much later for this; chosen by hand.
constexpr std::chrono::seconds MAX_TIME{2};

bool collapse(uintptr_t begin, uintptr_t end) {
    return madvise(reinterpret_cast<void *>(begin), end - begin, MADV_COLLAPSE) == 0;
}

}  // namespace

size_t use_huge_pages(const std::vector<mx::array> &arrays) {
    std::map<uintptr_t, uintptr_t> used;  // bytes of the arrays in each page
    for (const mx::array &array : arrays) {
        auto begin = reinterpret_cast<uintptr_t>(array.data<char>()), end = begin + array.nbytes();
        for (uintptr_t page = begin / PAGE * PAGE; page < end; page += PAGE)
            used[page] += std::min(end, page + PAGE) - std::max(begin, page);
    }
    std::erase_if(used, [](const auto &one) { return one.second < PAGE / 2; });
    size_t num_bytes = 0;
    int num_failures = 0;
    auto until = std::chrono::steady_clock::now() + MAX_TIME;
    for (auto first = used.begin(), next = first; first != used.end(); first = next) {
        if (num_failures == MAX_FAILURES || std::chrono::steady_clock::now() > until)
            break;
        uintptr_t begin = first->first, end = begin;
        for (; next != used.end() && next->first == end && end - begin < AT_ONCE; next++)
            end += PAGE;
        if (collapse(begin, end)) {
            num_bytes += end - begin;
            continue;
        }
        for (uintptr_t page = begin; page < end && num_failures < MAX_FAILURES; page += PAGE) {
            bool is_huge = collapse(page, page + PAGE);
            num_failures = is_huge ? 0 : num_failures + 1;
            num_bytes += is_huge ? PAGE : 0;
        }
    }
    return num_bytes;
}
#else
size_t use_huge_pages(const std::vector<mx::array> &) { return 0; }
#endif

}  // namespace outrider
