// Jobs of changing sizes from several callers, with pools replaced in between; every item must run exactly once, with
// its own job's context. test_threads.py builds it with the thread sanitizer.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

namespace {

void check(bool good, const char* what) {
  if (!good) {
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
  }
}

// Plain memory, so that the sanitizer sees whether a job's end orders what its items wrote.
void run_job(int64_t n, int salt) {
  std::vector<int> runs(n, 0);
  std::vector<int64_t> values(n, -1);
  tandem::parallel_for(n, [&](int64_t i) {
    runs[i]++;
    values[i] = i * 7 + salt;
    if (i % 5 == 0) {
      int64_t parts[3] = {};
      tandem::parallel_for(3, [&](int64_t k) { parts[k] = k + 1; });
      values[i] += parts[0] + parts[1] + parts[2] - 6;
    }
  });
  for (int64_t i = 0; i < n; i++) {
    check(runs[i] == 1, "an item ran not exactly once");
    check(values[i] == i * 7 + salt, "an item ran with another job's context");
  }
}

// Each thread goes through its own share in order, and takes of another's share the last items first.
void check_order(int num_threads) {
  constexpr int64_t kItems = 1000;
  std::vector<std::vector<int64_t>> taken(kItems);  // by thread; no more of them than items
  std::mutex mutex;
  std::map<std::thread::id, size_t> numbers;
  tandem::parallel_for(kItems, [&](int64_t i) {
    {
      const std::lock_guard lock(mutex);
      const size_t number = numbers.try_emplace(std::this_thread::get_id(), numbers.size()).first->second;
      taken[number].push_back(i);
    }
    if (i == kItems / 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // others take the rest of a share
  });
  const auto share = [&](int64_t i) {
    int64_t t = 0;
    while (kItems * (t + 1) / num_threads <= i) t++;
    return t;
  };
  for (const auto& items : taken) {
    int64_t rising = -1;
    for (size_t i = 1; i < items.size(); i++) {
      if (share(items[i]) != share(items[i - 1])) continue;
      if (items[i] > items[i - 1]) {
        check(items[i] == items[i - 1] + 1, "a thread left out items of its share");
        check(rising < 0 || rising == share(items[i]), "a thread went up through another's share");
        rising = share(items[i]);
      } else {
        check(rising != share(items[i]), "a thread went down through its own share");
      }
    }
  }
}

void call(int num_jobs, int seed) {
  uint32_t state = seed * 2654435761u + 1;
  for (int job = 0; job < num_jobs; job++) {
    state = state * 1664525 + 1013904223;
    run_job(state >> 24 & 63, job + seed);
    // Long enough, now and then, that the pool's threads fall asleep.
    if (job % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
}

}  // namespace

int main(int, char** arguments) {
  const int num_jobs = std::stoi(arguments[1]);
  for (int num_threads : {2, 3, 5, 1, 4}) {
    tandem::set_threads(num_threads, {});
    check(tandem::num_threads() == num_threads, "num_threads");
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; c++) callers.emplace_back(call, num_jobs, c * 1000 + num_threads);
    tandem::set_threads(num_threads + 1, {});  // under way
    for (auto& caller : callers) caller.join();
    check_order(num_threads + 1);
    run_job((1 << 19) + 5, num_threads);  // more than two threads' shares can hold
    tandem::set_threads(2, {});
    run_job((1 << 19) + 5, num_threads);
  }
  std::puts("ok");
}
