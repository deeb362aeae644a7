// A pool whose jobs are claimed item by item. Each thread has a *share* of the items, one run of them in order, and
// takes the next one of its own; when there is none left it takes the last one of another's. A thread so goes through
// memory in one stream, the same in every step, which it can fetch ahead across items, and nobody waits for who is slow.
//
//     shares_[t]   [ job's number 28 | end 18 | next 18 ]    one word per thread: next … end - 1 are unclaimed
//
//     take the next   [ job | end     | next + 1 ]           claiming is one compare-and-swap of the word
//     take the last   [ job | end - 1 | next     ]
//
//     caller          next = end in all shares: the last job has ended, no claim can succeed
//                     first items, item, context, ended = 0
//                     shares = [ job + 1 | end | 0 ]         claims succeed from here on
//                     job_ = job + 1, wake the sleepers, claim items like everyone else, wait until ended = count
//
// Why a claim is never of the wrong job: a thread reads the word, then the fields, then swaps the word, which within a
// job only shrinks. Fields of a later job are written after the last item of this one has been claimed and has ended,
// so the swap fails. Why no item is left: the caller claims until there is none, with or without help; a thread that
// wakes late finds nothing, or helps with a later job. Why the fields outlive their use: the caller returns only after
// every claimed item has ended, and nothing else is done with them.
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

constexpr int kIndexBits = 18;
constexpr uint64_t kIndexMask = (1u << kIndexBits) - 1;

// An unclaimed run of items, as one word.
struct Share {
  uint64_t word;

  static Share of(uint64_t job, uint64_t end) { return {job << 2 * kIndexBits | end << kIndexBits}; }
  uint64_t next() const { return word & kIndexMask; }
  uint64_t end() const { return word >> kIndexBits & kIndexMask; }
  bool is_empty() const { return next() == end(); }
  Share without_next() const { return {word + 1}; }
  Share without_last() const { return {word - (1u << kIndexBits)}; }
};

thread_local bool inside_item = false;

// Where a thread's share of n items begins, and the one before ends.
int64_t first_item(int64_t n, size_t thread, size_t num_threads) {
  return n * static_cast<int64_t>(thread) / static_cast<int64_t>(num_threads);
}

class Pool {
 public:
  Pool(int num_threads, const std::vector<int>& cores) : shares_(num_threads) {
    for (int i = 1; i < num_threads; i++) {
      threads_.emplace_back([this, i, core = cores.empty() ? -1 : cores[i]] { serve(i, core); });
    }
  }

  ~Pool() {
    stopping_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int64_t most_items() const { return static_cast<int64_t>(kIndexMask * shares_.size()); }

  void run(int64_t n, Item item, void* context) {
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    // Released one by one: who sees a new field sees that the last job's shares are empty, and its swap fails.
    item_.store(item, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    ended_.store(0, std::memory_order_relaxed);
    for (size_t i = 0; i < shares_.size(); i++) {
      const int64_t first = first_item(n, i, shares_.size()), end = first_item(n, i + 1, shares_.size());
      shares_[i].first.store(first, std::memory_order_release);
      shares_[i].left.store(Share::of(job, end - first).word, std::memory_order_release);
    }
    // In one order with a sleeper's own two steps: it counts itself, then looks at the job's number.
    job_.store(job, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) job_.notify_all();
    work(0);
    for (int looks = 1; ended_.load(std::memory_order_acquire) < n; looks++) {
      _mm_pause();
      if (looks % kLooksPerYield == 0) sched_yield();
    }
  }

 private:
  // What one side writes while others read has a cache line of its own; so has each share.
  struct alignas(64) SharedItems {
    std::atomic<uint64_t> left{0};
    std::atomic<int64_t> first{0};
  };

  // Claim and run items, one's own first, until there are none.
  void work(size_t self) {
    while (run_one(shares_[self], true)) {
    }
    for (size_t i = 1; i < shares_.size(); i++) {
      while (run_one(shares_[(self + i) % shares_.size()], false)) {
      }
    }
  }

  // The next item of one's own share, or the last of another's. False: none is left.
  bool run_one(SharedItems& items, bool own) {
    Share left{items.left.load(std::memory_order_acquire)};
    while (!left.is_empty()) {
      const Share rest = own ? left.without_next() : left.without_last();
      const auto index = static_cast<int64_t>(own ? left.next() : rest.end());
      const int64_t first = items.first.load(std::memory_order_acquire);
      const Item item = item_.load(std::memory_order_acquire);
      void* context = context_.load(std::memory_order_acquire);
      if (!items.left.compare_exchange_weak(left.word, rest.word, std::memory_order_acq_rel,
                                            std::memory_order_acquire)) {
        continue;
      }
      inside_item = true;
      item(context, first + index);
      inside_item = false;
      ended_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void serve(size_t self, int core) {
    if (core >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(core, &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a wish: without it the thread runs anywhere
    }
    uint32_t seen = 0;
    while (!stopping_.load()) {
      seen = next_job(seen);
      work(self);
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

  std::vector<SharedItems> shares_;
  alignas(64) std::atomic<int64_t> ended_{0};
  // 32 bits, which the system can sleep on directly.
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<Item> item_{nullptr};
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
  if (n <= 1 || inside_item || num_threads() == 1) return run_here(n, item, context);
  std::unique_lock lock(mutex);
  if (pool && n <= pool->most_items()) return pool->run(n, item, context);
  lock.unlock();  // an item may have items of its own
  run_here(n, item, context);
}

}  // namespace tandem
