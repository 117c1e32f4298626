#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../late_helper.h"

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
    std::atomic<int> thread_id{0};
    std::atomic<int> has_run{1};  // since it was woken
    Clock::time_point late_from;  // by then it should have run
};

// The chunks [first, end) of a thread that nobody has taken yet.
struct alignas(64) Share {
    std::atomic<uint64_t> left{0};  // the end in the upper half

    static constexpr uint64_t packed(uint32_t first, uint32_t end) { return uint64_t(end) << 32 | first; }

    void give(uint32_t first, uint32_t end) { left.store(packed(first, end), std::memory_order_release); }

    // The thread itself takes the first chunk, others the last one. -1: none is left.
    int take(bool is_own) {
        uint64_t now = left.load();
        for (;;) {
            uint32_t first = now, end = now >> 32;
            if (first >= end)
                return -1;
            if (left.compare_exchange_weak(now, is_own ? packed(first + 1, end) : packed(first, end - 1)))
                return is_own ? first : end - 1;
        }
    }
};

struct Pool {
    Share shares[MAX_THREADS];  // the caller's, then the helpers'
    alignas(64) std::atomic<int> num_shares{0};
    alignas(64) std::atomic<int> num_calls{0};  // of `parallel`; raised when all shares are given
    alignas(64) std::atomic<int> num_done{0};
    alignas(64) std::atomic<int> num_helpers{0};  // how many threads may help
    alignas(64) std::atomic<int> num_in_parts{0};  // operations in parts that are running
    alignas(64) std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
    int num_started = 0;
    const std::function<void(int)> *work = nullptr;  // does not change until all taken chunks are done
    Helper helpers[MAX_THREADS];
};

Pool pool;

void sleep(std::atomic<int> &is_asleep) {
    while (is_asleep.load())
        syscall(SYS_futex, reinterpret_cast<int *>(&is_asleep), FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
}

void wake(Helper &helper) {
    if (helper.is_asleep.load()) {
        helper.has_run.store(0);
        helper.late_from = Clock::now() + std::chrono::nanoseconds(LATE_NS);
        if (helper.is_asleep.exchange(0))
            syscall(SYS_futex, reinterpret_cast<int *>(&helper.is_asleep), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
        else
            helper.has_run.store(1);  // it has seen the work before it slept
    } else if (!helper.has_run.load() && Clock::now() > helper.late_from) {
        send_to_other_cores(helper.thread_id.load());
        helper.late_from = Clock::now() + std::chrono::nanoseconds(LATE_AGAIN_NS);
    }
}

// Does a chunk of the thread's own share, or else of another one. False: there is none.
bool help(int own) noexcept {
    int num = pool.num_shares.load(), chunk = own < num ? pool.shares[own].take(true) : -1;
    for (int i = 0; i < num && chunk < 0; i++)
        chunk = pool.shares[i].take(false);
    if (chunk < 0)
        return false;
    (*pool.work)(chunk);
    pool.num_done.fetch_add(1);
    return true;
}

std::chrono::nanoseconds spin_time() {
    return std::chrono::nanoseconds(pool.num_in_parts.load() ? SPIN_BETWEEN_PARTS_NS : SPIN_NS);
}

void run_helper(int number) {
    Helper &helper = pool.helpers[number];
    pthread_setname_np(pthread_self(), "outrider-helper");
    helper.thread_id.store(int(syscall(SYS_gettid)));
    int num_seen = 0;
    for (;;) {
        for (auto since = Clock::now(); Clock::now() - since < spin_time(); pause()) {
            int num_calls = pool.num_calls.load();
            if (num_calls == num_seen)
                continue;
            num_seen = num_calls;
            if (!helper.has_run.load())
                helper.has_run.store(1);
            while (number < pool.num_helpers.load() && help(number + 1))
                since = Clock::now();
        }
        helper.is_asleep.store(1);
        if (pool.num_calls.load() != num_seen)
            helper.is_asleep.store(0);
        sleep(helper.is_asleep);
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
            pool.helpers[pool.num_started].has_run.store(1);
            std::thread(run_helper, pool.num_started).detach();
        }
    } catch (const std::exception &) {
        pool.num_helpers.store(pool.num_started);  // no more threads are started until a new number is set
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void after_fork() {  // the child process has no helpers, and no work is shared
    pool.num_started = 0;
    for (Share &share : pool.shares)
        share.give(0, 0);
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
    pool.num_done.store(0);
    int num_shares = num_helpers + 1;
    pool.num_shares.store(num_shares);
    for (int i = 0; i < num_shares; i++)
        pool.shares[i].give(long(num_chunks) * i / num_shares, long(num_chunks) * (i + 1) / num_shares);
    pool.num_calls.fetch_add(1);
    for (int i = 0; i < std::min(num_helpers, pool.num_started); i++)
        wake(pool.helpers[i]);
    while (help(0)) {
    }
    for (int spins = 0; pool.num_done.load() < num_chunks; spins++)
        spins < 1000 ? pause() : std::this_thread::yield();  // the helper may be waiting for this core
    pool.is_taken.clear();
}

}  // namespace outrider
