#include "pool.h"

#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace td {
namespace {

constexpr int64_t kSpinNanoseconds = 20000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Event::wait_change(uint32_t seen) {
  int64_t until = 0;
  for (int i = 0;; i++) {
    if (word_.load(std::memory_order_acquire) != seen) return;
    relax();
    if ((i & 31) != 31) continue;
    int64_t t = now();
    if (!until) until = t + kSpinNanoseconds;
    if (t >= until) break;
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  [[maybe_unused]] int nap = 20;
  while (word_.load(std::memory_order_seq_cst) == seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    // Without a futex: short sleeps that grow to a millisecond, so that an idle pool costs next to nothing.
    std::this_thread::sleep_for(std::chrono::microseconds(nap));
    if (nap < 1000) nap *= 2;
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Event::advance() {
  word_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
  if (sleepers_.load(std::memory_order_seq_cst))
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads), shares_(size_) {
  for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stop_ = true;
  started_.advance();
  for (auto& t : threads_) t.join();
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    started_.wait_change(seen);
    seen++;
    if (stop_) return;
    fn_(context_, thread);
    barrier();
  }
}

void Pool::run(void (*fn)(void*, int), void* context) {
  std::lock_guard<std::mutex> lock(owner_);
  fn_ = fn;
  context_ = context;
  if (size_ > 1) started_.advance();
  fn(context, 0);
  barrier();
}

void Pool::barrier() {
  if (size_ == 1) return;
  uint32_t seen = released_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    for (auto& s : shares_) s.next.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    released_.advance();
    return;
  }
  released_.wait_change(seen);
}

}  // namespace td
