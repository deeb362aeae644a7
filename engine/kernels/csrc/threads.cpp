#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

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

// A ticket is the job's generation and the next unclaimed item. While the caller sets up a job it shows kClosed, so
// that a thread that read an old ticket and new fields fails to claim.
constexpr uint64_t kClosed = 0xFFFFFFFFu;
constexpr uint64_t index_of(uint64_t ticket) { return ticket & 0xFFFFFFFFu; }
constexpr uint64_t generation_of(uint64_t ticket) { return ticket >> 32; }

thread_local bool inside_item = false;

class Pool {
 public:
  Pool(int num_threads, std::vector<int> cores) : num_threads_(num_threads), cores_(std::move(cores)) {
    for (int i = 1; i < num_threads_; i++) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    stopping_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t n, Item item, void* context) {
    const uint64_t generation = generation_.load(std::memory_order_relaxed) + 1;
    item_.store(item, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(n, std::memory_order_relaxed);
    ended_.store(0, std::memory_order_relaxed);
    ticket_.store((generation & 0xFFFFFFFFu) << 32, std::memory_order_release);
    generation_.store(generation);
    if (sleeping_.load() > 0) generation_.notify_all();
    work();
    int looks = 0;
    while (ended_.load(std::memory_order_acquire) < n) {
      _mm_pause();
      if (++looks % 1024 == 0) sched_yield();
    }
    ticket_.store(((generation & 0xFFFFFFFFu) << 32) | kClosed);
  }

 private:
  void work() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (index_of(ticket) != kClosed) {
      const int64_t index = static_cast<int64_t>(index_of(ticket));
      const Item item = item_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (index >= count_.load(std::memory_order_relaxed)) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      inside_item = true;
      item(context, index);
      inside_item = false;
      ended_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void serve(int number) {
    if (!cores_.empty()) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cores_[number], &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    uint64_t seen = 0;
    while (!stopping_.load()) {
      seen = next_generation(seen);
      work();
    }
  }

  uint64_t next_generation(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kWatch;
    do {
      for (int i = 0; i < kPausesPerLook; i++) {
        const uint64_t now = generation_.load(std::memory_order_acquire);
        if (now != seen) return now;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    sleeping_.fetch_add(1);
    generation_.wait(seen);
    sleeping_.fetch_sub(1);
    return generation_.load(std::memory_order_acquire);
  }

  const int num_threads_;
  const std::vector<int> cores_;
  alignas(64) std::atomic<uint64_t> ticket_{kClosed};
  alignas(64) std::atomic<int64_t> ended_{0};
  alignas(64) std::atomic<uint64_t> generation_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int64_t> count_{0};
  std::atomic<Item> item_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::vector<std::thread> threads_;
};

std::mutex mutex;  // one caller at a time; tests run kernels from several threads
std::unique_ptr<Pool> pool;

}  // namespace

void set_threads(int num_threads, const std::vector<int>& cores) {
  const std::lock_guard lock(mutex);
  pool.reset();
  pool = std::make_unique<Pool>(num_threads, cores);
}

int num_threads() {
  const std::lock_guard lock(mutex);
  return pool ? pool->num_threads() : 1;
}

void run_items(int64_t n, Item item, void* context) {
  if (inside_item || n <= 1) {
    for (int64_t i = 0; i < n; i++) item(context, i);
    return;
  }
  const std::lock_guard lock(mutex);
  if (!pool || pool->num_threads() == 1) {
    inside_item = true;
    for (int64_t i = 0; i < n; i++) item(context, i);
    inside_item = false;
    return;
  }
  pool->run(n, item, context);
}

}  // namespace tandem
