/* Linux often wakes a thread on the core of the one that wakes it, and leaves it there behind that one for some
   milliseconds, though another core is free: one decode step in ten ran on one core of two. A helper that is late is
   sent to the other cores. Then it may use all cores of the caller again: helpers that always kept off the caller's core
   were up to a tenth slower where the scheduler makes no such mistake. */
#pragma once

#include <sched.h>

enum {
    LATE_NS = 200 * 1000,       /* after it was woken; chosen by hand */
    LATE_AGAIN_NS = 1000 * 1000 /* after it was sent away: the other cores are busy */
};

static inline void send_to_other_cores(int thread_id)
{
    cpu_set_t all, others;
    int core = sched_getcpu();
    if (core < 0 || sched_getaffinity(0, sizeof(all), &all))
        return;
    others = all;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(thread_id, sizeof(others), &others))
        return;
    sched_setaffinity(thread_id, sizeof(all), &all);
}
