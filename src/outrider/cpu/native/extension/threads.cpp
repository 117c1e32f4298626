#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

constexpr int MAX_THREADS = 64;
// Nanoseconds that a thread without work spins before it sleeps: more would slow its neighbours down. Between the parts
// of an operation the next work comes soon, and to wake a thread takes longer than that.
constexpr int SPIN_NS = 10'000, SPIN_BETWEEN_PARTS_NS = 100'000;

using Clock = std::chrono::steady_clock;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct alignas(64) Helper {
    std::atomic<int> is_asleep{0};
};

struct Pool {
    alignas(64) std::atomic<int> num_left{0};  // chunks that no thread has taken
    alignas(64) std::atomic<int> num_done{0};
    alignas(64) std::atomic<int> num_helpers{0};  // how many threads may help
    alignas(64) std::atomic<int> num_in_parts{0};  // operations in parts that are running
    std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
    int num_started = 0;
    int num_chunks = 0;                             // neither changes until all taken chunks are done
    const std::function<void(int)> *work = nullptr;
    Helper helpers[MAX_THREADS];
};

Pool pool;

void sleep(std::atomic<int> &is_asleep) {
    while (is_asleep.load())
        syscall(SYS_futex, reinterpret_cast<int *>(&is_asleep), FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
}

void wake(std::atomic<int> &is_asleep) {
    if (is_asleep.load() && is_asleep.exchange(0))
        syscall(SYS_futex, reinterpret_cast<int *>(&is_asleep), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

bool help() noexcept {
    int left = pool.num_left.load();
    while (left > 0 && !pool.num_left.compare_exchange_weak(left, left - 1)) {
    }
    if (left <= 0)
        return false;
    (*pool.work)(pool.num_chunks - left);
    pool.num_done.fetch_add(1);
    return true;
}

std::chrono::nanoseconds spin_time() {
    return std::chrono::nanoseconds(pool.num_in_parts.load() ? SPIN_BETWEEN_PARTS_NS : SPIN_NS);
}

void run_helper(int number) {
    std::atomic<int> &is_asleep = pool.helpers[number].is_asleep;
    for (;;) {
        for (auto since = Clock::now(); Clock::now() - since < spin_time(); pause())
            while (number < pool.num_helpers.load() && help())
                since = Clock::now();
        is_asleep.store(1);
        if (number < pool.num_helpers.load() && pool.num_left.load() > 0)
            is_asleep.store(0);
        sleep(is_asleep);
    }
}

// A helper inherits the rounding and flushing modes of the thread that starts it. All callers are assumed to have the
// same modes.
void start_helpers(int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals go to the program's own threads
    try {
        for (; pool.num_started < count; pool.num_started++) {
            pool.helpers[pool.num_started].is_asleep.store(0);
            std::thread(run_helper, pool.num_started).detach();
        }
    } catch (const std::exception &) {
        pool.num_helpers.store(pool.num_started);  // no more threads are started until a new number is set
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void after_fork() {  // the child process has no helpers, and no work is shared
    pool.num_started = 0;
    pool.num_left.store(0);
    pool.num_in_parts.store(0);
    pool.is_taken.clear();
}

}  // namespace

InParts::InParts() { pool.num_in_parts.fetch_add(1); }
InParts::~InParts() { pool.num_in_parts.fetch_sub(1); }

void set_num_threads(int count) {
    static const int watches_forks = pthread_atfork(nullptr, nullptr, after_fork);
    if (watches_forks == 0)
        pool.num_helpers.store(std::clamp(count, 1, MAX_THREADS) - 1);
}

int num_threads() { return pool.num_helpers.load() + 1; }

void parallel(int num_chunks, const std::function<void(int)> &work) {
    int num_helpers = std::min(pool.num_helpers.load(), num_chunks - 1);
    if (num_helpers <= 0 || pool.is_taken.test_and_set()) {
        for (int chunk = 0; chunk < num_chunks; chunk++)
            work(chunk);
        return;
    }
    if (pool.num_started < num_helpers)
        start_helpers(num_helpers);
    pool.work = &work;
    pool.num_chunks = num_chunks;
    pool.num_done.store(0);
    pool.num_left.store(num_chunks);
    for (int i = 0; i < std::min(num_helpers, pool.num_started); i++)
        wake(pool.helpers[i].is_asleep);
    while (help()) {
    }
    for (int spins = 0; pool.num_done.load() < num_chunks; spins++)
        spins < 1000 ? pause() : std::this_thread::yield();  // the helper may be waiting for this core
    pool.is_taken.clear();
}

}  // namespace outrider
