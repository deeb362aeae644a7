// A pool whose jobs are claimed item by item from one word.
//
//     ticket_    [ job's number | next unclaimed item ]      claiming is one compare-and-swap of the word
//
//     caller     ticket = [ job | kClosed ]   no claim succeeds: the last job has ended
//                item, context, count, ended = 0
//                ticket = [ job + 1 | 0 ]     claims succeed from here on
//                job_ = job + 1, wake the sleepers, claim items like everyone else, wait until ended = count
//
// Why a claim is never of the wrong job: a thread reads the ticket, then the fields, then swaps the ticket. Fields that
// belong to a later job were written after the ticket had been closed, so the swap fails. Why no item is left: the
// caller claims until there is none, with or without help; a thread that wakes late finds the ticket closed, or helps
// with a later job. Why the fields outlive their use: the caller returns only after every claimed item has ended, and
// nothing else is done with them.
//
// A thread that the system puts aside in the middle of an item is waited for. The caller then gives its own core away
// after a short while, as it may be just the one that the thread waits for.
#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

namespace tandem {
namespace {

// How long an idle thread watches before it sleeps: longer than the gaps between the jobs of a step.
constexpr auto kWatch = std::chrono::microseconds(100);
constexpr int kPausesPerLook = 16;
// How often the caller looks for the end before it offers its core: some microseconds, less than an item takes.
constexpr int kLooksPerYield = 256;

constexpr uint64_t kClosed = 0xFFFFFFFFu;
constexpr int64_t kMaxItems = kClosed - 1;
constexpr uint64_t index_of(uint64_t ticket) { return ticket & 0xFFFFFFFFu; }
constexpr uint64_t ticket_of(uint32_t job, uint64_t index) { return static_cast<uint64_t>(job) << 32 | index; }

thread_local bool inside_item = false;

class Pool {
 public:
  Pool(int num_threads, const std::vector<int>& cores) {
    for (int i = 1; i < num_threads; i++) {
      threads_.emplace_back([this, core = cores.empty() ? -1 : cores[i]] { serve(core); });
    }
  }

  ~Pool() {
    stopping_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void run(int64_t n, Item item, void* context) {
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    // Released one by one: who sees a new field sees the ticket closed as well, and its swap fails.
    item_.store(item, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    count_.store(n, std::memory_order_release);
    ended_.store(0, std::memory_order_relaxed);
    ticket_.store(ticket_of(job, 0), std::memory_order_release);
    // In one order with a sleeper's own two steps: it counts itself, then looks at the job's number.
    job_.store(job, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) job_.notify_all();
    work();
    for (int looks = 1; ended_.load(std::memory_order_acquire) < n; looks++) {
      _mm_pause();
      if (looks % kLooksPerYield == 0) sched_yield();
    }
    ticket_.store(ticket_of(job, kClosed), std::memory_order_seq_cst);
  }

 private:
  // Claim and run items until there are none.
  void work() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (index_of(ticket) != kClosed) {
      const auto index = static_cast<int64_t>(index_of(ticket));
      const Item item = item_.load(std::memory_order_acquire);
      void* context = context_.load(std::memory_order_acquire);
      if (index >= count_.load(std::memory_order_acquire)) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      inside_item = true;
      item(context, index);
      inside_item = false;
      ended_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void serve(int core) {
    if (core >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(core, &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a wish: without it the thread runs anywhere
    }
    uint32_t seen = 0;
    while (!stopping_.load()) {
      seen = next_job(seen);
      work();
    }
  }

  // The number of a job that isn't `seen`, watched for and then slept for.
  uint32_t next_job(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kWatch;
    do {
      for (int i = 0; i < kPausesPerLook; i++) {
        const uint32_t now = job_.load(std::memory_order_acquire);
        if (now != seen) return now;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    job_.wait(seen, std::memory_order_seq_cst);
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    return job_.load(std::memory_order_acquire);
  }

  // Each word that one side writes while the other reads has a cache line of its own. job_ has 32 bits, which the
  // system can sleep on directly.
  alignas(64) std::atomic<uint64_t> ticket_{kClosed};
  alignas(64) std::atomic<int64_t> ended_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int64_t> count_{0};
  std::atomic<Item> item_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::vector<std::thread> threads_;
};

std::mutex mutex;  // held by whoever uses or changes the pool
std::unique_ptr<Pool> pool;
std::atomic<int> pool_threads{1};

// A forked child has only the thread that forked: it computes alone until it calls set_threads, and the parent's pool
// is left where it lies, as its threads can't be joined.
void forget_pool_when_forked() {
  static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                               [] {
                                                 static_cast<void>(pool.release());
                                                 pool_threads.store(1);
                                                 mutex.unlock();
                                               });
  static_cast<void>(registered);
}

void run_here(int64_t n, Item item, void* context) {
  for (int64_t i = 0; i < n; i++) item(context, i);
}

}  // namespace

void set_threads(int num_threads, const std::vector<int>& cores) {
  forget_pool_when_forked();
  const std::lock_guard lock(mutex);
  pool.reset();
  if (num_threads > 1) pool = std::make_unique<Pool>(num_threads, cores);
  pool_threads.store(std::max(num_threads, 1), std::memory_order_relaxed);
}

int num_threads() { return pool_threads.load(std::memory_order_relaxed); }

void run_items(int64_t n, Item item, void* context) {
  if (n <= 1 || n > kMaxItems || inside_item || num_threads() == 1) return run_here(n, item, context);
  std::unique_lock lock(mutex);
  if (pool) return pool->run(n, item, context);
  lock.unlock();  // an item may have items of its own
  run_here(n, item, context);
}

}  // namespace tandem
