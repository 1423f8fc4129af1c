// One step of a decoder-only transformer over ragged rows: embedding to logits in one call, one pool dispatch.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "runtime.h"

namespace td {
namespace {

enum Error : int32_t { OK = 0, TOO_MANY_ROWS = -1, TOO_MANY_OUT = -2, BAD_STEP = -3, NO_MEMORY = -4 };

// A 64-byte aligned array that never grows after construction.
template <class T>
class Array {
 public:
  void make(int64_t n) {
    // calloc maps fresh pages lazily: what no step uses costs no memory.
    raw_.reset(std::calloc(static_cast<size_t>(n) * sizeof(T) + 64, 1));
    if (!raw_) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(raw_.get()) + 63) & ~uintptr_t{63});
  }
  T* get() const { return data_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> raw_;
  T* data_ = nullptr;
};

// A task of attention: rows of one sequence under one KV head; split-parallel tasks write partial results.
struct Task {
  int32_t seq, head, row0, row1, split0, split1;
  int64_t part;  // offset in floats, -1: writes the output itself
};

// Partial results to be merged for (row, query head) pairs of one head.
struct Merge {
  int32_t row, head, parts;
  int64_t part, stride;
};

class Decoder {
 public:
  explicit Decoder(const TdModel& model);
  int32_t forward(const TdStep& step);
  int32_t logits(const float* hidden, int64_t rows, float* out);
  void profile(int64_t* nanoseconds) { times_ = nanoseconds; }

 private:
  struct Linear {
    const TdWeight* w;
    const float* bias;
    float* out;
    int64_t ldo;
  };
  int32_t plan(const TdStep& step);
  void plan_sequence(int32_t s, int64_t rows, int64_t tasks_elsewhere);
  void body(int thread);
  void layer(int thread, const TdLayer& l, bool last);
  void linears(int thread, const Linear* list, int count, const TdAct& x, int64_t rows, bool add,
               bool choosing = false);
  void norm_prepare(int thread, const float* x, const float* w, int64_t rows, int32_t need, const TdAct& act);
  void attend(int thread, const TdLayer& l);
  void rotate_and_store(const TdLayer& l, int64_t row);
  void mlp(int thread, const TdLayer& l, int64_t rows);
  void residual(int thread, const TdWeight& w, const float* bias, const float* norm, const TdAct& x, int64_t rows);
  void head(int thread);
  void project(int thread, const float* hidden, int64_t rows, float* logits, int32_t* best);
  void choose(int64_t rows, int32_t* best);
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  // Books the time since the last call to a part, if anybody asked for it.
  void lap(int thread, TdPart part) {
    if (thread || !times_) return;
    int64_t t = now();
    times_[part] += t - lap_;
    lap_ = t;
  }
  // Running argmax of each output row, per thread: see TdKernels::peak. A thread that took no part has no `seen`.
  static constexpr int64_t kPeak = 32;
  float* peaks(int thread) const { return peaks_.get() + thread * m_.max_out * kPeak; }
  float* scratch(int thread) { return scratch_.get() + thread * scratch_stride_; }

  TdModel m_;
  std::vector<TdLayer> layers_;
  const TdKernels* K_;
  std::shared_ptr<Pool> pool_;
  int64_t qkv_width_, q_width_, kv_width_, scratch_stride_;
  Array<float> hidden_, qkv_, attn_, up_, gate_, temp_, scratch_, partials_, act_f_, peaks_;
  Array<int8_t> act_q_;
  Array<TdXBlock> act_b_;
  Array<uint16_t> act_h_;
  std::vector<int32_t> position_, seq_of_, seen_;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  int64_t partial_floats_ = 0, partial_room_ = 0;
  const TdStep* step_ = nullptr;
  int64_t* times_ = nullptr;  // [TD_PARTS] or null
  int64_t lap_ = 0;
};

Decoder::Decoder(const TdModel& model) : m_(model), layers_(model.layers, model.layers + model.n_layers) {
  K_ = kernels();
  pool_ = pool();
  q_width_ = int64_t{m_.heads} * m_.head_dim;
  kv_width_ = int64_t{m_.kv_heads} * m_.head_dim;
  qkv_width_ = q_width_ + 2 * kv_width_;
  const int64_t rows = m_.max_rows > m_.max_out ? m_.max_rows : m_.max_out;
  int64_t widest = m_.hidden;
  for (const TdLayer& l : layers_)
    for (const TdWeight* w : {&l.q, &l.o, &l.gate, &l.down}) widest = w->k > widest ? w->k : widest;
  hidden_.make(rows * m_.hidden);
  temp_.make(rows * m_.hidden);
  qkv_.make(rows * qkv_width_);
  attn_.make(rows * q_width_);
  gate_.make(rows * m_.intermediate);
  up_.make(rows * m_.intermediate);
  act_f_.make(rows * widest);
  act_q_.make(rows * widest);
  act_b_.make(rows * (widest / 32));
  act_h_.make(rows * widest);
  const int64_t group = m_.heads / m_.kv_heads;
  scratch_stride_ = (TD_ATTN_SCRATCH(int64_t{m_.head_dim}, group) + m_.hidden + 15) / 16 * 16;
  scratch_.make(scratch_stride_ * pool_->size());
  peaks_.make(int64_t{m_.max_out} * kPeak * pool_->size());
  seen_.resize(static_cast<size_t>(pool_->size()));
  position_.resize(static_cast<size_t>(rows));
  seq_of_.resize(static_cast<size_t>(rows));
  // Split-parallel tasks are few by construction (see plan_sequence): room for 8 rows x 64 splits x all heads.
  partial_room_ = int64_t{8} * 64 * m_.heads * (m_.head_dim + 2);
  partials_.make(partial_room_);
  tasks_.reserve(static_cast<size_t>(rows) * static_cast<size_t>(m_.kv_heads) + 64 * 64);
  merges_.reserve(8 * static_cast<size_t>(m_.heads) * 8);
}

// Few short slices over a long context: split the context over threads. Which way is taken changes no bit, since
// a long slice's task folds the same splits in the same order.
void Decoder::plan_sequence(int32_t s, int64_t rows, int64_t others) {
  const TdStep& step = *step_;
  const int64_t group = m_.heads / m_.kv_heads, last = step.start[s] + rows - 1;
  const int32_t splits = static_cast<int32_t>(last / TD_KV_SPLIT + 1);
  const int64_t entry = m_.head_dim + 2, need = rows * m_.heads * splits * entry;
  const bool spread = rows <= 8 && splits > 1 && others < 4 * pool_->size() && partial_floats_ + need <= partial_room_ &&
                      merges_.size() + static_cast<size_t>(rows * m_.heads) <= merges_.capacity();
  const int64_t rows_per_task = group < TD_Q_MOST ? TD_Q_MOST / group : 1;
  for (int32_t h = 0; h < m_.kv_heads; h++) {
    if (!spread) {
      for (int64_t r = step.row_start[s]; r < step.row_start[s + 1]; r += rows_per_task) {
        int64_t end = r + rows_per_task < step.row_start[s + 1] ? r + rows_per_task : step.row_start[s + 1];
        int64_t reach = step.start[s] + (end - step.row_start[s]) - 1;
        tasks_.push_back({s, h, static_cast<int32_t>(r), static_cast<int32_t>(end), 0,
                          static_cast<int32_t>(reach / TD_KV_SPLIT + 1), -1});
      }
      continue;
    }
    const int64_t base = partial_floats_, per_split = rows * group * entry;
    for (int32_t i = 0; i < splits; i++)
      tasks_.push_back({s, h, step.row_start[s], step.row_start[s + 1], i, i + 1, base + i * per_split});
    for (int64_t q = 0; q < rows * group; q++)
      merges_.push_back({static_cast<int32_t>(step.row_start[s] + q / group), static_cast<int32_t>(h * group + q % group),
                         splits, base + q * entry, per_split});
    partial_floats_ += splits * per_split;
  }
}

int32_t Decoder::plan(const TdStep& step) {
  if (step.n_rows < 1 || step.n_rows > m_.max_rows) return TOO_MANY_ROWS;
  if (step.n_out < 0 || step.n_out > m_.max_out) return TOO_MANY_OUT;
  if (step.n_seqs < 1 || step.row_start[0] != 0 || step.row_start[step.n_seqs] != step.n_rows) return BAD_STEP;
  step_ = &step;
  tasks_.clear();
  merges_.clear();
  partial_floats_ = 0;
  for (int32_t s = 0; s < step.n_seqs; s++) {
    const int32_t r0 = step.row_start[s], r1 = step.row_start[s + 1];
    if (r1 <= r0 || step.start[s] < 0 || step.start[s] + (r1 - r0) > m_.max_positions) return BAD_STEP;
    for (int32_t r = r0; r < r1; r++) {
      position_[static_cast<size_t>(r)] = step.start[s] + r - r0;
      seq_of_[static_cast<size_t>(r)] = s;
      if (step.tokens[r] < 0 || step.tokens[r] >= m_.vocab) return BAD_STEP;
    }
    const int64_t used = (step.start[s] + (r1 - r0) - 1) / m_.block_size + 1;
    if (used > step.table_stride) return BAD_STEP;
    for (int64_t b = 0; b < used; b++) {
      int32_t id = step.block_tables[s * step.table_stride + b];
      if (id < 0 || id >= m_.num_blocks) return BAD_STEP;
    }
  }
  for (int32_t i = 0; i < step.n_out; i++)
    if (step.out_rows[i] < 0 || step.out_rows[i] >= step.n_rows || (i && step.out_rows[i] <= step.out_rows[i - 1]))
      return BAD_STEP;
  for (int32_t s = 0; s < step.n_seqs; s++)
    plan_sequence(s, step.row_start[s + 1] - step.row_start[s], int64_t{step.n_seqs} * m_.kv_heads);
  return OK;
}

int32_t Decoder::forward(const TdStep& step) {
  int32_t error = plan(step);
  if (error) return error;
  pool_->run([](void* c, int thread) { static_cast<Decoder*>(c)->body(thread); }, this);
  return OK;
}

void Decoder::body(int thread) {
  const int64_t n = step_->n_rows;
  if (times_ && thread == 0) lap_ = now();
  pool_->phase(thread, n, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      float* x = hidden_.get() + r * m_.hidden;
      unpack_row(m_.embed, step_->tokens[r], x);
      if (m_.embed_scale != 1.0f)
        for (int64_t i = 0; i < m_.hidden; i++) x[i] *= m_.embed_scale;
    }
  });
  lap(thread, TD_PART_EMBED);
  for (size_t i = 0; i < layers_.size(); i++) layer(thread, layers_[i], i + 1 == layers_.size());
  if (step_->n_out) head(thread);
  lap(thread, TD_PART_HEAD);
}

void Decoder::norm_prepare(int thread, const float* x, const float* w, int64_t rows, int32_t need, const TdAct& act) {
  pool_->phase(thread, rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      float* t = scratch(thread);
      K_->rmsnorm(x + r * m_.hidden, w, m_.eps, m_.hidden, t);
      K_->prepare(t, m_.hidden, need, &act, r);
    }
  });
}

// Several linears over the same activations as one phase. choosing: keeps the peaks of what one linear puts out.
void Decoder::linears(int thread, const Linear* list, int count, const TdAct& x, int64_t rows, bool add,
                      bool choosing) {
  constexpr int64_t kRows = 256;  // activations of a unit stay in L2
  int64_t columns = 0;
  for (int i = 0; i < count; i++) columns += (list[i].w->n + 15) / 16;
  const int64_t parts = (rows + kRows - 1) / kRows;
  pool_->phase(thread, columns * parts, rows > 8 ? 1 : 2, [&](int64_t a, int64_t b) {
    for (int64_t u = a; u < b; u++) {
      int64_t part = u / columns, c = u % columns, m0 = part * kRows, m1 = m0 + kRows < rows ? m0 + kRows : rows;
      int i = 0;
      while (c >= (list[i].w->n + 15) / 16) c -= (list[i++].w->n + 15) / 16;
      const Linear& l = list[i];
      K_->linear(l.w, c, c + 1, &x, m0, m1, l.out, l.ldo, l.bias, add ? 1 : 0, m_.residual_scale);
      if (!choosing) continue;
      float* state = peaks(thread);
      if (!seen_[static_cast<size_t>(thread)]) {
        seen_[static_cast<size_t>(thread)] = 1;
        for (int64_t j = 0; j < rows * kPeak; j++)
          state[j] = j % kPeak < 16 ? -std::numeric_limits<float>::infinity() : 0x1p24f;
      }
      for (int64_t m = m0; m < m1; m++) K_->peak(l.out + m * l.ldo + c * 16, l.w->n - c * 16, c, state + m * kPeak);
    }
  });
}

void Decoder::rotate_and_store(const TdLayer& l, int64_t row) {
  const int64_t dim = m_.head_dim, position = position_[static_cast<size_t>(row)], half = m_.rotary_dim / 2;
  float* q = qkv_.get() + row * qkv_width_;
  float *k = q + q_width_, *v = k + kv_width_;
  const float *cos = l.cos + position * half, *sin = l.sin + position * half;
  for (int64_t h = 0; h < m_.heads; h++) {
    if (l.q_norm) K_->rmsnorm(q + h * dim, l.q_norm, m_.eps, dim, q + h * dim);
    K_->rope(q + h * dim, cos, sin, m_.rotary_dim);
  }
  const int32_t* table = step_->block_tables + seq_of_[static_cast<size_t>(row)] * step_->table_stride;
  const int64_t bs = m_.block_size, slot = position % bs;
  const int64_t width = m_.kv_type == TD_KV_F32 ? 4 : m_.kv_type == TD_KV_BF16 ? 2 : 1;
  for (int64_t h = 0; h < m_.kv_heads; h++) {
    if (l.k_norm) K_->rmsnorm(k + h * dim, l.k_norm, m_.eps, dim, k + h * dim);
    K_->rope(k + h * dim, cos, sin, m_.rotary_dim);
    const int64_t unit = int64_t{table[position / bs]} * m_.kv_heads + h;
    const int64_t group = (unit * bs + slot / 16 * 16) * dim * width;
    auto *kg = static_cast<uint8_t*>(l.k_cache) + group, *vg = static_cast<uint8_t*>(l.v_cache) + group;
    float* ks = l.k_scale ? l.k_scale + unit * bs + slot : nullptr;
    float* vs = l.v_scale ? l.v_scale + unit * bs + slot : nullptr;
    K_->kv_write(k + h * dim, v + h * dim, m_.kv_type, dim, kg, vg, slot % 16, ks, vs);
  }
}

void Decoder::attend(int thread, const TdLayer& l) {
  const TdStep& step = *step_;
  TdAttn base = {};
  base.q = qkv_.get();
  base.out = attn_.get();
  base.ldq = qkv_width_;
  base.ldo = q_width_;
  base.k_cache = l.k_cache;
  base.v_cache = l.v_cache;
  base.k_scale = l.k_scale;
  base.v_scale = l.v_scale;
  base.scratch = scratch(thread);
  base.window = l.window;
  base.group = m_.heads / m_.kv_heads;
  base.kv_heads = m_.kv_heads;
  base.head_dim = m_.head_dim;
  base.block_size = m_.block_size;
  base.kv_type = m_.kv_type;
  base.scale = m_.attn_scale;
  base.softcap = m_.attn_softcap;
  pool_->phase(thread, static_cast<int64_t>(tasks_.size()), 1, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const Task& t = tasks_[static_cast<size_t>(i)];
      TdAttn x = base;
      x.row0 = t.row0;
      x.row1 = t.row1;
      x.first_pos = position_[static_cast<size_t>(t.row0)];
      x.split0 = t.split0;
      x.split1 = t.split1;
      x.head = t.head;
      x.table = step.block_tables + t.seq * step.table_stride;
      x.part = t.part < 0 ? nullptr : partials_.get() + t.part;
      x.next_table = nullptr;
      if (i + 1 < static_cast<int64_t>(tasks_.size())) {
        const Task& next = tasks_[static_cast<size_t>(i) + 1];
        x.next_table = step.block_tables + next.seq * step.table_stride;
        x.next_head = next.head;
        x.next_pos = int64_t{next.split0} * TD_KV_SPLIT;
        int64_t left = position_[static_cast<size_t>(next.row1) - 1] + 1 - x.next_pos;
        x.next_n = static_cast<int32_t>(left < TD_KV_TILE ? left : TD_KV_TILE);
      }
      K_->attention(&x);
    }
  });
  if (merges_.empty()) return;
  pool_->phase(thread, static_cast<int64_t>(merges_.size()), 4, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; i++) {
      const Merge& t = merges_[static_cast<size_t>(i)];
      K_->merge(partials_.get() + t.part, t.parts, t.stride, m_.head_dim,
                attn_.get() + t.row * q_width_ + int64_t{t.head} * m_.head_dim);
    }
  });
}

// hidden += scale * norm(x . w + bias); the norm is Gemma's and usually absent.
void Decoder::residual(int thread, const TdWeight& w, const float* bias, const float* norm, const TdAct& x, int64_t rows) {
  if (!norm) {
    Linear one = {&w, bias, hidden_.get(), m_.hidden};
    linears(thread, &one, 1, x, rows, true);
    return;
  }
  Linear one = {&w, bias, temp_.get(), m_.hidden};
  linears(thread, &one, 1, x, rows, false);
  pool_->phase(thread, rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      float* t = temp_.get() + r * m_.hidden;
      K_->rmsnorm(t, norm, m_.eps, m_.hidden, t);
      K_->add_scaled(hidden_.get() + r * m_.hidden, t, m_.residual_scale, m_.hidden);
    }
  });
}

void Decoder::mlp(int thread, const TdLayer& l, int64_t rows) {
  TdAct x = {act_f_.get(), act_q_.get(), act_b_.get(), act_h_.get(), m_.hidden};
  norm_prepare(thread, hidden_.get(), l.mlp_norm, rows, activation_need(l.gate.kind) | activation_need(l.up.kind), x);
  lap(thread, TD_PART_NORM);
  const int64_t width = m_.intermediate;
  Linear two[2] = {{&l.gate, l.gate_bias, gate_.get(), width}, {&l.up, l.up_bias, up_.get(), width}};
  linears(thread, two, 2, x, rows, false);
  lap(thread, TD_PART_GATE_UP);
  TdAct y = x;
  y.k = width;
  const int32_t need = activation_need(l.down.kind);
  pool_->phase(thread, rows, rows > 8 ? 2 : 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      K_->gated(gate_.get() + r * width, up_.get() + r * width, width, m_.activation);
      K_->prepare(gate_.get() + r * width, width, need, &y, r);
    }
  });
  lap(thread, TD_PART_GATED);
  residual(thread, l.down, l.down_bias, l.post_mlp_norm, y, rows);
  lap(thread, TD_PART_DOWN);
}

void Decoder::layer(int thread, const TdLayer& l, bool last) {
  int64_t rows = step_->n_rows;
  TdAct x = {act_f_.get(), act_q_.get(), act_b_.get(), act_h_.get(), m_.hidden};
  int32_t need = activation_need(l.q.kind) | activation_need(l.k.kind) | activation_need(l.v.kind);
  norm_prepare(thread, hidden_.get(), l.attn_norm, rows, need, x);
  lap(thread, TD_PART_NORM);
  float* qkv = qkv_.get();
  Linear three[3] = {{&l.q, l.q_bias, qkv, qkv_width_},
                     {&l.k, l.k_bias, qkv + q_width_, qkv_width_},
                     {&l.v, l.v_bias, qkv + q_width_ + kv_width_, qkv_width_}};
  linears(thread, three, 3, x, rows, false);
  lap(thread, TD_PART_QKV);
  pool_->phase(thread, rows, 2, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) rotate_and_store(l, r);
  });
  lap(thread, TD_PART_ROPE);
  attend(thread, l);
  lap(thread, TD_PART_ATTENTION);
  // After the last attention only rows that are asked for go on. Ascending row numbers make the move safe in place
  // when one thread does it.
  if (last && step_->n_out < rows) {
    rows = step_->n_out;
    pool_->phase(thread, 1, 1, [&](int64_t, int64_t) {
      for (int64_t i = 0; i < rows; i++) {
        std::memmove(hidden_.get() + i * m_.hidden, hidden_.get() + step_->out_rows[i] * int64_t{m_.hidden},
                     static_cast<size_t>(m_.hidden) * 4);
        std::memmove(attn_.get() + i * q_width_, attn_.get() + step_->out_rows[i] * q_width_,
                     static_cast<size_t>(q_width_) * 4);
      }
    });
    if (rows == 0) return;
  }
  TdAct y = x;
  y.k = q_width_;
  const int32_t need_o = activation_need(l.o.kind);
  pool_->phase(thread, rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) K_->prepare(attn_.get() + r * q_width_, q_width_, need_o, &y, r);
  });
  residual(thread, l.o, l.o_bias, l.post_attn_norm, y, rows);
  lap(thread, TD_PART_OUT);
  mlp(thread, l, rows);
}

void Decoder::head(int thread) {
  const TdStep& step = *step_;
  const int64_t rows = step.n_out;
  float* states = step.hidden ? step.hidden : temp_.get();
  pool_->phase(thread, rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++)
      K_->rmsnorm(hidden_.get() + r * m_.hidden, m_.final_norm, m_.eps, m_.hidden, states + r * m_.hidden);
  });
  if (step.logits) project(thread, states, rows, step.logits, step.best);
}

// Writes the id of each row's greatest logit, from what all threads have seen; of equal ones the lowest.
void Decoder::choose(int64_t rows, int32_t* best) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; row++) {
    float top = -kInfinite;
    int64_t id = -1;
    for (int t = 0; t < pool_->size(); t++) {
      if (!seen_[static_cast<size_t>(t)]) continue;
      const float* state = peaks(t) + row * kPeak;
      for (int64_t lane = 0; lane < 16; lane++) {
        if (state[lane] == -kInfinite || state[lane] < top) continue;
        const int64_t here = static_cast<int64_t>(state[16 + lane]) * 16 + lane;
        if (state[lane] > top || here < id) id = here;
        top = state[lane];
      }
    }
    best[row] = top == kInfinite ? -2 : static_cast<int32_t>(id);
  }
  for (auto& one : seen_) one = 0;
}

void Decoder::project(int thread, const float* hidden, int64_t rows, float* logits, int32_t* best) {
  TdAct x = {act_f_.get(), act_q_.get(), act_b_.get(), act_h_.get(), m_.hidden};
  const int32_t need = activation_need(m_.head.kind);
  pool_->phase(thread, rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) K_->prepare(hidden + r * m_.hidden, m_.hidden, need, &x, r);
  });
  Linear one = {&m_.head, m_.head_bias, logits, m_.vocab};
  const bool as_is = m_.logit_scale == 1.0f && m_.logit_softcap == 0.0f;
  const bool choosing = best && as_is;
  linears(thread, &one, 1, x, rows, false, choosing);
  if (choosing) {
    if (thread == 0) choose(rows, best);
    return;
  }
  if (as_is) return;
  pool_->phase(thread, rows, 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) {
      float* y = logits + r * m_.vocab;
      if (m_.logit_scale != 1.0f)
        for (int64_t i = 0; i < m_.vocab; i++) y[i] *= m_.logit_scale;
      if (m_.logit_softcap > 0.0f) K_->softcap(y, m_.vocab, m_.logit_softcap);
      if (best) best[r] = static_cast<int32_t>(K_->argmax(y, m_.vocab));
    }
  });
}

int32_t Decoder::logits(const float* hidden, int64_t rows, float* out) {
  if (rows < 1 || rows > m_.max_rows) return TOO_MANY_ROWS;
  struct Job {
    Decoder* self;
    const float* hidden;
    int64_t rows;
    float* out;
  } job = {this, hidden, rows, out};
  pool_->run(
      [](void* c, int thread) {
        auto* j = static_cast<Job*>(c);
        j->self->project(thread, j->hidden, j->rows, j->out, nullptr);
      },
      &job);
  return OK;
}

}  // namespace
}  // namespace td

// The decoder keeps the model's weights, caches and tables by pointer: the caller keeps them alive. null: no memory.
TD_API void* td_decoder_new(const TdModel* model) {
  try {
    return new td::Decoder(*model);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
// From now on each step adds the nanoseconds of its parts to ns[TD_PARTS], which the caller keeps; null switches it off.
TD_API void td_decoder_profile(void* d, int64_t* ns) { static_cast<td::Decoder*>(d)->profile(ns); }
TD_API void td_decoder_free(void* d) { delete static_cast<td::Decoder*>(d); }
// 0, or: -1 rows out of range, -2 output rows out of range, -3 inconsistent step.
TD_API int32_t td_decoder_forward(void* d, const TdStep* step) { return static_cast<td::Decoder*>(d)->forward(*step); }
// Logits [rows][vocab] of hidden states [rows][hidden] after the final norm.
TD_API int32_t td_decoder_logits(void* d, const float* hidden, int64_t rows, float* out) {
  return static_cast<td::Decoder*>(d)->logits(hidden, rows, out);
}
