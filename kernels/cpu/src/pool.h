// The process's thread pool. Every thread runs the same function; phases end in a barrier that spins at most 20 us and
// then sleeps on a futex, so that waiting never takes a core from another process.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace td {

class Event {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void wait_change(uint32_t seen);
  void advance();

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  int size() const { return size_; }

  // Runs fn(context, thread) on every thread, the caller's being number 0; returns when all are done.
  void run(void (*fn)(void*, int), void* context);

  // Inside run: splits [0, units) over the threads in contiguous shares, handed out in chunks; a thread that has
  // finished its share takes from others. Ends in a barrier. Which thread does a unit never changes its result.
  template <class F>
  void phase(int thread, int64_t units, int64_t chunk, F&& f) {
    if (size_ == 1) {
      if (units > 0) f(int64_t{0}, units);
      return;
    }
    for (int k = 0; k < size_; k++) {
      int v = thread + k < size_ ? thread + k : thread + k - size_;
      int64_t lo = units * v / size_, hi = units * (v + 1) / size_;
      for (;;) {
        if (k && lo + shares_[v].next.load(std::memory_order_relaxed) >= hi) break;
        int64_t at = lo + shares_[v].next.fetch_add(chunk, std::memory_order_relaxed);
        if (at >= hi) break;
        f(at, at + chunk < hi ? at + chunk : hi);
      }
    }
    barrier();
  }
  void barrier();

 private:
  void work(int thread);

  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
  };
  int size_;
  std::vector<Share> shares_;
  std::vector<std::thread> threads_;
  std::mutex owner_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) Event released_;
  alignas(64) Event started_;
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
};

}  // namespace td
