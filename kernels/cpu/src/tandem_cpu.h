// Plain C ABI of the CPU kernels, and the structures that the translation units share. No C++ library types here:
// this header is included by the per-ISA units, where an inline function compiled for AVX-512 must never become the
// copy that the linker keeps for everyone.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define TD_API extern "C" __declspec(dllexport)
#else
#define TD_API extern "C" __attribute__((visibility("default")))
#endif

// Bumped whenever a structure or a tile layout changes; Python checks it.
#define TD_ABI_VERSION 5

// Forms of a weight in tiles of 16 outputs x 32 inputs. Names say which file format they hold exactly.
enum TdKind {
  TD_F32 = 0,    // [K][16] fp32
  TD_BF16 = 1,   // [K/2][16][2] bf16
  TD_Q4_1 = 2,   // u4, fp16 scale, fp16 minimum per 32
  TD_Q4_0 = 3,   // u4 - 8, fp16 scale per 32
  TD_Q8_0 = 4,   // s8, fp16 scale per 32
  TD_Q5_0 = 5,   // s8 in [-16, 15], fp16 scale per 32
  TD_Q5_1 = 6,   // s8 in [0, 31], fp16 scale, fp16 minimum per 32
  TD_Q4_K = 7,   // u4, fp32 scale, fp32 minimum per 32
  TD_Q5_K = 8,   // s8 in [0, 31], fp32 scale, fp32 minimum per 32
  TD_Q6_K = 9,   // s8 in [-32, 31], fp32 scale per 16
  TD_Q2_K = 10,  // u4 in [0, 3], fp32 scale, fp32 minimum per 16
  TD_Q3_K = 11,  // u4 - 8 in [-4, 3], fp32 scale per 16
  TD_Q8_C = 12,  // s8, fp32 scale per 32
  TD_KINDS = 13
};

// Parts of a step whose time td_decoder_profile reports, as its first thread sees them, waiting included.
enum TdPart {
  TD_PART_EMBED = 0, TD_PART_NORM, TD_PART_QKV, TD_PART_ROPE, TD_PART_ATTENTION, TD_PART_OUT, TD_PART_GATE_UP, TD_PART_GATED,
  TD_PART_DOWN, TD_PART_HEAD, TD_PARTS
};

enum TdKvType { TD_KV_F32 = 0, TD_KV_BF16 = 1, TD_KV_I8 = 2 };
enum TdNeed { TD_NEED_F32 = 1, TD_NEED_I8 = 2, TD_NEED_BF16 = 4 };

// One linear layer's weight: ceil(n / 16) tile columns, each K/32 tiles long. k is a multiple of 32.
struct TdWeight {
  const uint8_t* data;
  int64_t n;
  int64_t k;
  int32_t kind;
  int32_t reserved;
};

// Scale of 32 int8 activations: value = s * q; fs = s * sum(q); i0, i1 = sums of the two halves.
struct TdXBlock {
  float s;
  float fs;
  int32_t i0;
  int32_t i1;
};

// Activations of M rows in the forms that the weights need.
struct TdAct {
  float* f;         // [M][k]
  int8_t* q;        // [M][k]
  TdXBlock* b;      // [M][k/32]
  uint16_t* h;      // [M][k] bf16
  int64_t k;
};

struct TdLayer {
  const float* attn_norm;       // [hidden]
  const float* mlp_norm;        // [hidden]
  const float* post_attn_norm;  // [hidden] or null
  const float* post_mlp_norm;   // [hidden] or null
  const float* q_norm;          // [head_dim] or null
  const float* k_norm;          // [head_dim] or null
  const float* q_bias;
  const float* k_bias;
  const float* v_bias;
  const float* o_bias;
  const float* gate_bias;
  const float* up_bias;
  const float* down_bias;
  const float* cos;  // [max_positions][rotary_dim / 2]
  const float* sin;
  void* k_cache;   // [num_blocks][kv_heads][block_size / 16][head_dim][16]; bf16: [..][head_dim / 2][16][2]
  void* v_cache;   // [num_blocks][kv_heads][block_size][head_dim]; bf16: [..][block_size / 2][head_dim][2]
  float* k_scale;  // [num_blocks][kv_heads][block_size], int8 KV only
  float* v_scale;
  TdWeight q, k, v, o, gate, up, down;
  int64_t window;  // 0: none
};

struct TdModel {
  int32_t n_layers, hidden, heads, kv_heads, head_dim, rotary_dim, intermediate, vocab;
  int32_t kv_type, block_size, activation, max_rows, max_out, max_positions;
  int64_t num_blocks;
  float eps, attn_scale, attn_softcap, logit_softcap, embed_scale, logit_scale, residual_scale;
  float reserved;
  TdWeight embed, head;
  const float* final_norm;
  const float* head_bias;
  const TdLayer* layers;
};

// One step. Rows of sequence s are row_start[s] .. row_start[s+1]; its first row stands at position start[s].
struct TdStep {
  int32_t n_rows, n_seqs, n_out, reserved;
  const int32_t* tokens;
  const int32_t* row_start;
  const int32_t* start;
  const int32_t* block_tables;  // [n_seqs][table_stride]
  int64_t table_stride;
  const int32_t* out_rows;  // rows that want logits or hidden states, ascending
  float* logits;            // [n_out][vocab] or null
  float* hidden;            // [n_out][hidden], after the final norm, or null
  int32_t* best;            // [n_out] id of the greatest logit, -1: all are -inf, -2: one is NaN or +inf; or null
};

// What one attention task does: rows row0 .. row1 of one sequence, one KV head, splits split0 .. split1.
struct TdAttn {
  const float* q;  // [rows][heads * head_dim] (row stride ldq), rotated
  float* out;      // [rows][heads * head_dim]
  float* part;     // non-null: partial results, per (row, group head): m, l, acc[head_dim]
  int64_t ldq, ldo;
  int64_t row0, row1;   // rows within the step
  int64_t first_pos;    // absolute position of row0
  int64_t split0, split1;
  const int32_t* table;
  const void* k_cache;
  const void* v_cache;
  const float* k_scale;
  const float* v_scale;
  float* scratch;
  int64_t window;
  int32_t head, group, kv_heads, head_dim, block_size, kv_type;
  float scale, softcap;
  // Where the KV that the thread is likely to read next begins: to be fetched ahead. Null: not known.
  const int32_t* next_table;
  int64_t next_pos;
  int32_t next_n, next_head;  // positions, KV head
};

#define TD_KV_TILE 64    // positions per softmax tile, at absolute multiples
#define TD_KV_SPLIT 512  // positions per split, at absolute multiples
#define TD_Q_MOST 192    // queries (rows x heads of a group) per attention task, if a group has no more

// Sampling of one row. top_k 0, top_p 1 and min_p 0 switch a filter off; temperature 0 is greedy.
struct TdSample {
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  uint64_t seed;
  int32_t position;
  int32_t choice;
  int32_t purpose;
  int32_t reserved;
};

// A draft head. up.data null: gate has both, one under the other.
struct TdHead {
  TdWeight in, gate, up, down, out;
  TdWeight embed;              // the target's
  const float *g_s, *g_e, *g_o;  // [hidden]
  const int32_t* ids;          // [out.n]: the target's ids of its outputs, ascending
  int32_t hidden, inner;
  float eps;
  int32_t reserved;
};

#define TD_CLAIMS 10  // steps in which probabilities that a head claims are told apart

// What a head drafts for one sequence in one call.
struct TdChain {
  const float* hidden;  // [hidden]: the target's state whose logits gave `token`
  const float* trust;   // [2][TD_CLAIMS][2]: chance = first + second * claim, of the first draft and of later ones; or null
  const float* least;   // [most]: after draft i the chain goes on while all are right with a greater chance; or null: always
  int32_t* ids;         // [most] out
  float* claims;        // [most] out: probability of each, at temperature 1
  TdSample sample;      // of the first draft; further ones follow it by position
  int32_t token, most;
  int32_t count;  // out
  float reach;    // out: chance that all are right
  int32_t ended, reserved;
};

struct TdKernels {
  const char* name;
  int32_t needs_bf16;  // bf16 weights read bf16 activations
  void (*linear)(const TdWeight*, int64_t tile0, int64_t tile1, const TdAct*, int64_t m0, int64_t m1, float* out,
                 int64_t ldo, const float* bias, int32_t add, float alpha);
  void (*prepare)(const float* x, int64_t k, int32_t need, const TdAct*, int64_t row);
  void (*rmsnorm)(const float* x, const float* w, float eps, int64_t n, float* out);
  void (*add_scaled)(float* x, const float* y, float alpha, int64_t n);
  void (*rope)(float* x, const float* cos, const float* sin, int64_t rotary_dim);
  void (*gated)(float* gate, const float* up, int64_t n, int32_t activation);
  void (*softcap)(float* x, int64_t n, float cap);
  void (*kv_write)(const float* k, const float* v, int32_t type, int64_t head_dim, void* k_group, void* v_group,
                   int64_t slot, float* k_scale, float* v_scale);
  void (*attention)(const TdAttn*);
  void (*merge)(const float* parts, int64_t n_parts, int64_t stride, int64_t head_dim, float* out);
  int64_t (*argmax)(const float* x, int64_t n);
  void (*peak)(const float* x, int64_t n, int64_t column, float* state);
  void (*divide)(const float* x, int64_t n, float by, float* out);
  double (*expsum)(const float* x, int64_t n, float top, float floor);
  int64_t (*find_from)(const float* x, int64_t n, float least, int32_t* out, int64_t room);
  int64_t (*count_greater)(const float* x, int64_t n, float than);
  int64_t (*argmax_noise)(const float* x, int64_t n, int64_t first, float by, float floor, const int32_t* names,
                          int32_t* room, const TdSample*);
  int64_t (*argmax_noise_of)(const float* x, const int32_t* places, int64_t count, const int32_t* names,
                             const TdSample*);
  void (*noise)(const TdSample*, int64_t n, float* fast, float* exact);
};

#define TD_ATTN_SCRATCH(head_dim, group) \
  (2 * TD_KV_TILE * (head_dim) +                       \
   ((group) > TD_Q_MOST ? (group) : TD_Q_MOST) * (5 * (head_dim) / 2 + TD_KV_TILE + 64) + 64)
