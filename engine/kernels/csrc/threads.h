// The kernels' own threads.
//
// A job is n independent items. The caller and the pool's threads claim items one by one, and the job has ended when
// all items have: a thread that the system has put aside costs nothing unless it holds an item, the others take its
// share. Each thread begins with a run of consecutive items that is the same in every job of as many, and goes through
// it in order, so what lies in order in memory is one stream to it. Which thread takes which item decides nothing about
// bits.
//
// A thread without work watches for the next job for a short while, as the jobs of one step follow each other within
// microseconds, and then sleeps. Items don't throw.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

namespace tandem {

using Item = void (*)(void* context, int64_t index);

// Run item(context, i) for every i in [0, n) and return when all have ended. Callers on several threads take turns. A
// call from within an item of several runs its items itself.
void run_items(int64_t n, Item item, void* context);

template <class Body>
void parallel_for(int64_t n, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_items(n, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); }, &body);
}

// Use this many threads, the caller among them: 1, the default, until told otherwise. With `cores` (as many, or none)
// the pool's threads are pinned to all but the first, which is the caller's: the caller is left as it is.
void set_threads(int num_threads, const std::vector<int>& cores);
int num_threads();

}  // namespace tandem
