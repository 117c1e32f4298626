// Shares work among threads.
#pragma once

#include <functional>

namespace outrider {

// The number of threads that one call of `parallel` may use, its caller included.
void set_num_threads(int count);
int num_threads();

// Calls work(chunk) once for each chunk in [0, num_chunks), on several threads. The caller takes chunks like the other
// threads do, and waits only for chunks that have begun: a thread that gets no core costs nothing. One caller at a
// time has the threads; another one does its work alone. `work` must not throw.
void parallel(int num_chunks, const std::function<void(int)> &work);

}  // namespace outrider
