/* Helper threads keep off the core of the thread that they help. Linux often wakes a thread on the core of the one that
   wakes it and leaves it there for some milliseconds, though another core is free: one decode step in ten ran on one
   core of two. */
#pragma once

#include <sched.h>
#include <stdbool.h>

/* True if the caller has come to another core than `*core`: then `*core` is changed, and the helpers belong on `*others`,
   the other cores that the caller may use. */
static inline bool has_changed_core(int *core, cpu_set_t *others)
{
    int now = sched_getcpu();
    if (now == *core || now < 0 || sched_getaffinity(0, sizeof(*others), others))
        return false;
    *core = now;
    CPU_CLR(now, others);
    return CPU_COUNT(others) > 0;
}
