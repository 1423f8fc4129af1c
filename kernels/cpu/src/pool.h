// The process's thread pool. Every thread runs the same function, a sequence of phases whose units are handed out. A
// phase is over when its units are done, not when all threads have come: a thread whose core another process took is
// waited for only if it is in the middle of a unit; it skips the phases that it missed. Whoever waits spins at most
// 20 us and then sleeps on a futex, so that waiting never takes a core from another process.
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

  // Runs fn(context, thread) on the caller (thread 0) and on every other thread that comes in time; returns when all
  // phases are over and nobody is in fn any more. All threads must go through the same phases; what they do between two
  // phases may be done late or, by a thread that never came, not at all.
  void run(void (*fn)(void*, int), void* context);

  // Inside run: splits [0, units) over the threads in contiguous shares, handed out in chunks; a thread that has
  // finished its share takes from others. Returns when all units are done. Which thread does a unit never changes its
  // result.
  template <class F>
  void phase(int thread, int64_t units, int64_t chunk, F&& f) {
    if (units <= 0) return;
    if (size_ == 1) {
      f(int64_t{0}, units);
      return;
    }
    Local& local = locals_[static_cast<size_t>(thread)];
    const uint32_t number = local.phase++;
    if (over_.value() != number) return;
    int64_t done = 0;
    for (int k = 0; k < size_; k++) {
      int v = thread + k < size_ ? thread + k : thread + k - size_;
      const int64_t lo = units * v / size_, hi = units * (v + 1) / size_;
      for (int64_t at; (at = claim(shares_[static_cast<size_t>(v)].next, number, chunk, hi - lo)) >= 0;) {
        at += lo;
        const int64_t end = at + chunk < hi ? at + chunk : hi;
        f(at, end);
        done += end - at;
      }
    }
    if (done) finished(number, done, units);
    over_.wait_change(number);
  }

 private:
  void work(int thread);
  bool enter();
  void leave();
  void finished(uint32_t number, int64_t done, int64_t units);

  // Takes `chunk` of a share's `size` units if its counter still belongs to the phase. Returns the first, or -1.
  static int64_t claim(std::atomic<uint64_t>& next, uint32_t number, int64_t chunk, int64_t size) {
    uint64_t now = next.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t at = static_cast<int64_t>(now & 0xffffffff);
      if (static_cast<uint32_t>(now >> 32) != number || at >= size) return -1;
      if (next.compare_exchange_weak(now, now + static_cast<uint64_t>(chunk), std::memory_order_relaxed)) return at;
    }
  }

  struct alignas(64) Share {
    // The phase's number in the upper half, units handed out in the lower one: a late thread takes none of a later phase.
    std::atomic<uint64_t> next{0};
  };
  struct alignas(64) Local {
    uint32_t phase = 0;  // number of the thread's next phase
  };
  int size_;
  std::vector<Share> shares_;
  std::vector<Local> locals_;
  std::vector<std::thread> threads_;
  std::mutex owner_;
  alignas(64) std::atomic<int64_t> done_{0};  // units of the current phase
  alignas(64) Event over_;                    // its value is the number of phases that are over
  alignas(64) Event started_;
  // Threads in fn besides the caller; kClosed while no run takes any in.
  static constexpr uint32_t kClosed = 1u << 31;
  alignas(64) std::atomic<uint32_t> inside_{kClosed};
  Event left_;
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  uint32_t first_ = 0;  // number of the run's first phase
  std::atomic<bool> stop_{false};
};

}  // namespace td
