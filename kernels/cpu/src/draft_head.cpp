// Chains of drafts of a head on the target's hidden states (tandem/lm/proposers/head_net.py has its arithmetic), for
// several sequences in one call: a few barriers per token and nothing else, because each token takes microseconds.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "runtime.h"

namespace td {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int32_t kSilu = 0;

class Head {
 public:
  explicit Head(const TdHead& head) : h_(head), K_(kernels()), pool_(pool()) {}
  void draft(TdChain* chains, int64_t count);

 private:
  void body(int thread);
  void linear(int thread, const TdWeight& w, const TdAct& x, int64_t rows, float* out, int64_t ldo);
  void mix(int thread, int64_t rows);
  void mlp(int thread, int64_t rows);
  void choose(int64_t row);
  TdAct act(int64_t k) { return {f_.data(), q_.data(), blocks_.data(), half_.data(), k}; }
  template <class F>
  void each(int thread, int64_t rows, F&& f) {
    pool_->phase(thread, rows, 1, [&](int64_t a, int64_t b) {
      for (int64_t r = a; r < b; r++) f(r);
    });
  }

  const TdHead h_;
  const TdKernels* K_;
  std::shared_ptr<Pool> pool_;
  TdChain* chains_ = nullptr;
  // Chains that go on; row i of every buffer but state_ is of live_[i].
  std::vector<int32_t> live_;
  // How many went on in each round: a thread that comes late goes through the same phases.
  std::vector<int64_t> rounds_;
  std::vector<float> state_, mixed_, gates_, added_, logits_;
  // The inputs of linears in the forms that weights need.
  std::vector<float> f_;
  std::vector<int8_t> q_;
  std::vector<TdXBlock> blocks_;
  std::vector<uint16_t> half_;
};

void Head::draft(TdChain* chains, int64_t count) {
  const int64_t hidden = h_.hidden, inner = h_.inner, wide = std::max(2 * hidden, inner);
  if (count * hidden > static_cast<int64_t>(state_.size())) {
    auto rows = static_cast<size_t>(count);
    state_.resize(rows * static_cast<size_t>(hidden));
    mixed_.resize(rows * static_cast<size_t>(2 * hidden));
    gates_.resize(rows * static_cast<size_t>(2 * inner));
    added_.resize(rows * static_cast<size_t>(hidden));
    logits_.resize(rows * static_cast<size_t>(h_.out.n));
    f_.resize(rows * static_cast<size_t>(wide));
    q_.resize(rows * static_cast<size_t>(wide));
    half_.resize(rows * static_cast<size_t>(wide));
    blocks_.resize(rows * static_cast<size_t>(wide / 32));
  }
  chains_ = chains;
  live_.clear();
  for (int64_t i = 0; i < count; i++) {
    chains[i].count = 0;
    chains[i].reach = 1.0f;
    chains[i].ended = chains[i].most <= 0 || chains[i].token < 0 || chains[i].token >= h_.embed.n;
    if (!chains[i].ended) live_.push_back(static_cast<int32_t>(i));
  }
  if (live_.empty()) return;
  int64_t most = 0;
  for (int32_t i : live_) most = std::max(most, static_cast<int64_t>(chains[i].most));
  rounds_.assign(static_cast<size_t>(most) + 1, 0);
  rounds_[0] = static_cast<int64_t>(live_.size());
  pool_->run([](void* c, int thread) { static_cast<Head*>(c)->body(thread); }, this);
}

void Head::linear(int thread, const TdWeight& w, const TdAct& x, int64_t rows, float* out, int64_t ldo) {
  pool_->phase(thread, (w.n + 15) / 16, 2, [&](int64_t a, int64_t b) {
    K_->linear(&w, a, b, &x, 0, rows, out, ldo, nullptr, 0, 1.0f);
  });
}

void Head::body(int thread) {
  const int64_t hidden = h_.hidden;
  const TdAct x = act(hidden);
  const int32_t first = activation_need(h_.in.kind), last = activation_need(h_.out.kind);
  int64_t rows = rounds_[0];
  each(thread, rows, [&](int64_t r) { K_->prepare(chains_[live_[static_cast<size_t>(r)]].hidden, hidden, first, &x, r); });
  linear(thread, h_.in, x, rows, added_.data(), hidden);
  each(thread, rows, [&](int64_t r) {
    std::copy_n(added_.data() + r * hidden, hidden, state_.data() + live_[static_cast<size_t>(r)] * hidden);
  });
  for (size_t round = 0; (rows = rounds_[round]); round++) {
    mix(thread, rows);
    mlp(thread, rows);
    each(thread, rows, [&](int64_t r) {
      float* s = state_.data() + live_[static_cast<size_t>(r)] * hidden;
      for (int64_t i = 0; i < hidden; i++) s[i] += added_[static_cast<size_t>(r * hidden + i)];
      float* normed = mixed_.data() + r * 2 * hidden;
      K_->rmsnorm(s, h_.g_o, h_.eps, hidden, normed);
      K_->prepare(normed, hidden, last, &x, r);
    });
    linear(thread, h_.out, x, rows, logits_.data(), h_.out.n);
    each(thread, rows, [&](int64_t r) { choose(r); });
    pool_->phase(thread, 1, 1, [&](int64_t, int64_t) {
      live_.erase(std::remove_if(live_.begin(), live_.end(), [&](int32_t i) { return chains_[i].ended; }), live_.end());
      rounds_[round + 1] = static_cast<int64_t>(live_.size());
    });
  }
}

// The input of the MLP: state and embedding of the last token, both normed.
void Head::mix(int thread, int64_t rows) {
  const int64_t hidden = h_.hidden;
  const TdAct z = act(2 * hidden);
  const int32_t need = activation_need(h_.gate.kind) | (h_.up.data ? activation_need(h_.up.kind) : 0);
  each(thread, rows, [&](int64_t r) {
    const int32_t i = live_[static_cast<size_t>(r)];
    const TdChain& chain = chains_[i];
    float* mixed = mixed_.data() + r * 2 * hidden;
    float* token = added_.data() + r * hidden;
    unpack_row(h_.embed, chain.count ? chain.ids[chain.count - 1] : chain.token, token);
    K_->rmsnorm(state_.data() + i * hidden, h_.g_s, h_.eps, hidden, mixed);
    K_->rmsnorm(token, h_.g_e, h_.eps, hidden, mixed + hidden);
    K_->prepare(mixed, 2 * hidden, need, &z, r);
  });
}

void Head::mlp(int thread, int64_t rows) {
  const int64_t inner = h_.inner;
  const TdAct z = act(2 * h_.hidden), y = act(inner);
  linear(thread, h_.gate, z, rows, gates_.data(), 2 * inner);
  if (h_.up.data) linear(thread, h_.up, z, rows, gates_.data() + inner, 2 * inner);
  const int32_t need = activation_need(h_.down.kind);
  each(thread, rows, [&](int64_t r) {
    float* gate = gates_.data() + r * 2 * inner;
    K_->gated(gate, gate + inner, inner, kSilu);
    K_->prepare(gate, inner, need, &y, r);
  });
  linear(thread, h_.down, y, rows, added_.data(), h_.hidden);
}

// Samples one draft, and decides whether the chain goes on.
void Head::choose(int64_t row) {
  TdChain& chain = chains_[live_[static_cast<size_t>(row)]];
  const float* x = logits_.data() + row * h_.out.n;
  TdSample sample = chain.sample;
  sample.position += chain.count;
  const int64_t place = sample_row(x, h_.out.n, sample, h_.ids);
  if (place < 0) {
    chain.ended = 1;
    return;
  }
  const float top = x[K_->argmax(x, h_.out.n)];
  const double claim = std::exp(static_cast<double>(x[place] - top)) / K_->expsum(x, h_.out.n, top, kNever);
  chain.ids[chain.count] = h_.ids[place];
  chain.claims[chain.count] = static_cast<float>(claim);
  if (chain.trust) {
    const int at = std::min(static_cast<int>(claim * TD_CLAIMS), TD_CLAIMS - 1) + (chain.count ? TD_CLAIMS : 0);
    chain.reach *= chain.trust[2 * at] + chain.trust[2 * at + 1] * static_cast<float>(claim);
  }
  const int32_t at = chain.count++;
  chain.ended = chain.count >= chain.most || (chain.least && !(chain.reach > chain.least[at]));
}

}  // namespace
}  // namespace td

// The head keeps weights, gains and ids by pointer: the caller keeps them alive. null: no memory.
TD_API void* td_head_new(const TdHead* head) {
  try {
    return new td::Head(*head);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
TD_API void td_head_free(void* head) { delete static_cast<td::Head*>(head); }
// Fills ids, claims, count and reach of each chain.
TD_API void td_head_draft(void* head, TdChain* chains, int64_t count) {
  static_cast<td::Head*>(head)->draft(chains, count);
}
