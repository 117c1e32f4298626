// Shares work among threads.
#pragma once

#include <algorithm>
#include <functional>

namespace outrider {

// The number of threads that one call of `parallel` may use, its caller included.
void set_num_threads(int count);
int num_threads();

// Calls work(chunk) once for each chunk in [0, num_chunks), on several threads. Each thread has a share of consecutive
// chunks, which it does in order: what `work` fetches ahead is what the same thread needs next. A thread that is done
// takes chunks from the end of the others' shares. The caller waits only for chunks that have begun: a thread that gets no
// core costs nothing. One caller at a time has the threads; another one does its work alone. `work` must not throw.
void parallel(int num_chunks, const std::function<void(int)> &work);

// Calls work(t) for each of `num` tokens, on several threads if there are enough. A token's work takes about a
// microsecond.
template <class Work>
void for_tokens(int num, const Work &work) {
    constexpr int MIN_SHARED = 4, MAX_PER_CHUNK = 8;  // chosen by hand
    int per_chunk = num < MIN_SHARED ? num : std::clamp(num / (2 * num_threads()), 1, MAX_PER_CHUNK);
    int num_chunks = (num + per_chunk - 1) / std::max(per_chunk, 1);
    parallel(num_chunks, [&](int chunk) {
        int first = chunk * per_chunk;
        for (int t = first; t < std::min(first + per_chunk, num); t++)
            work(t);
    });
}

// An operation that calls `parallel` again and again: as long as this lives, the threads wait longer before they sleep.
struct InParts {
    InParts();
    ~InParts();
    InParts(const InParts &) = delete;
};

}  // namespace outrider
