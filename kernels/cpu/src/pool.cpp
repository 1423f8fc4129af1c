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

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads), shares_(size_), locals_(size_) {
  for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stop_ = true;
  started_.advance();
  for (auto& t : threads_) t.join();
}

// Takes part in the run that is open. False if none is.
bool Pool::enter() {
  uint32_t now = inside_.load(std::memory_order_relaxed);
  do {
    if (now & kClosed) return false;
  } while (!inside_.compare_exchange_weak(now, now + 1, std::memory_order_acquire, std::memory_order_relaxed));
  return true;
}

void Pool::leave() {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) left_.advance();
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    started_.wait_change(seen);
    seen = started_.value();
    if (stop_) return;
    if (!enter()) continue;
    locals_[static_cast<size_t>(thread)].phase = first_;
    fn_(context_, thread);
    leave();
  }
}

void Pool::run(void (*fn)(void*, int), void* context) {
  std::lock_guard<std::mutex> lock(owner_);
  if (size_ == 1) {
    fn(context, 0);
    return;
  }
  fn_ = fn;
  context_ = context;
  locals_[0].phase = first_ = over_.value();
  inside_.store(0, std::memory_order_release);
  started_.advance();
  fn(context, 0);
  uint32_t seen = left_.value();
  if (inside_.fetch_or(kClosed, std::memory_order_acq_rel))
    left_.wait_change(seen);
}

// Counts units that a thread has done. The last ones end the phase.
void Pool::finished(uint32_t number, int64_t done, int64_t units) {
  if (done_.fetch_add(done, std::memory_order_acq_rel) + done != units) return;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t next = static_cast<uint64_t>(number + 1) << 32;
  for (auto& s : shares_) s.next.store(next, std::memory_order_relaxed);
  over_.advance();
}

}  // namespace td
