#include "huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>

#include <algorithm>
#include <map>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1 and later
#endif
#endif

namespace outrider {

namespace mx = mlx::core;

#ifdef __linux__
constexpr uintptr_t PAGE = 2 << 20;  // bytes of a huge page

size_t use_huge_pages(const std::vector<mx::array> &arrays) {
    std::map<uintptr_t, uintptr_t> used;  // bytes of the arrays in each page: arrays are smaller than pages, or larger
    for (const mx::array &array : arrays) {
        auto begin = reinterpret_cast<uintptr_t>(array.data<char>()), end = begin + array.nbytes();
        for (uintptr_t page = begin / PAGE * PAGE; page < end; page += PAGE)
            used[page] += std::min(end, page + PAGE) - std::max(begin, page);
    }
    size_t num_bytes = 0;
    for (auto [page, bytes] : used)  // what else is in a page moves with it
        if (bytes >= PAGE / 2 && madvise(reinterpret_cast<void *>(page), PAGE, MADV_COLLAPSE) == 0)
            num_bytes += PAGE;
    return num_bytes;
}
#else
size_t use_huge_pages(const std::vector<mx::array> &) { return 0; }
#endif

}  // namespace outrider
