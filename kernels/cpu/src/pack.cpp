// From the blocks of a GGUF file (or plain arrays) to weight tiles, and back for single rows. The block layouts are
// those of the GGUF format (ggml-common.h is their public description).
#include <cstring>

#include "runtime.h"

namespace {

// Numbers of the GGUF tensor types.
enum Source : int32_t {
  SRC_F32 = 0, SRC_F16 = 1, SRC_Q4_0 = 2, SRC_Q4_1 = 3, SRC_Q5_0 = 6, SRC_Q5_1 = 7, SRC_Q8_0 = 8,
  SRC_Q2_K = 10, SRC_Q3_K = 11, SRC_Q4_K = 12, SRC_Q5_K = 13, SRC_Q6_K = 14, SRC_BF16 = 30,
  // Not of GGUF: s8 rows with one fp32 scale per row before them.
  SRC_I8_ROW = 100
};

float f32_of_f16(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
  if (e == 0) {
    float f = static_cast<float>(m) * 5.9604644775390625e-08f;
    std::memcpy(&u, &f, 4);
    u |= sign;
  } else if (e == 31) {
    u = sign | 0x7f800000u | (m << 13);
  } else {
    u = sign | ((e + 112) << 23) | (m << 13);
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

uint16_t bf16_of_f32(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 64);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

float f32_of_bf16(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// 32 weights: value[i] = d[i / 16] * q[i] + m[i / 16]. raw16: fp16 bits of d and m where the file has them.
struct Block {
  int q[32];
  float d[2];
  float m[2];
  uint16_t raw_d, raw_m;
};

struct SourceInfo {
  int64_t weights, bytes;
};

SourceInfo source_info(int32_t type) {
  switch (type) {
    case SRC_F32: return {1, 4};
    case SRC_F16: case SRC_BF16: return {1, 2};
    case SRC_Q4_0: return {32, 18};
    case SRC_Q4_1: return {32, 20};
    case SRC_Q5_0: return {32, 22};
    case SRC_Q5_1: return {32, 24};
    case SRC_Q8_0: return {32, 34};
    case SRC_Q2_K: return {256, 84};
    case SRC_Q3_K: return {256, 110};
    case SRC_Q4_K: return {256, 144};
    case SRC_Q5_K: return {256, 176};
    case SRC_Q6_K: return {256, 210};
    case SRC_I8_ROW: return {1, 1};
  }
  return {0, 0};
}

// Scale and minimum number j (0..7) of the twelve bytes of Q4_K and Q5_K.
void scale_min_k4(int j, const uint8_t* s, int* sc, int* mn) {
  if (j < 4) {
    *sc = s[j] & 63;
    *mn = s[j + 4] & 63;
  } else {
    *sc = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *mn = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

// Block number b (of 32 weights) of a row of a quantised source.
void read_block(int32_t type, const uint8_t* row, int64_t b, Block* o) {
  SourceInfo info = source_info(type);
  const uint8_t* p = row + b * 32 / info.weights * info.bytes;
  const int j = static_cast<int>(b & 7);  // which 32 of 256
  o->m[0] = o->m[1] = 0.0f;
  o->raw_m = 0;
  switch (type) {
    case SRC_Q4_0:
    case SRC_Q4_1: {
      bool min = type == SRC_Q4_1;
      o->raw_d = load16(p);
      if (min) o->raw_m = load16(p + 2);
      const uint8_t* n = p + (min ? 4 : 2);
      for (int i = 0; i < 16; i++) {
        o->q[i] = (n[i] & 15) - (min ? 0 : 8);
        o->q[i + 16] = (n[i] >> 4) - (min ? 0 : 8);
      }
      o->d[0] = o->d[1] = f32_of_f16(o->raw_d);
      if (min) o->m[0] = o->m[1] = f32_of_f16(o->raw_m);
      return;
    }
    case SRC_Q5_0:
    case SRC_Q5_1: {
      bool min = type == SRC_Q5_1;
      o->raw_d = load16(p);
      if (min) o->raw_m = load16(p + 2);
      uint32_t high;
      std::memcpy(&high, p + (min ? 4 : 2), 4);
      const uint8_t* n = p + (min ? 8 : 6);
      for (int i = 0; i < 16; i++) {
        o->q[i] = static_cast<int>((n[i] & 15) | (((high >> i) & 1) << 4)) - (min ? 0 : 16);
        o->q[i + 16] = static_cast<int>((n[i] >> 4) | (((high >> (i + 16)) & 1) << 4)) - (min ? 0 : 16);
      }
      o->d[0] = o->d[1] = f32_of_f16(o->raw_d);
      if (min) o->m[0] = o->m[1] = f32_of_f16(o->raw_m);
      return;
    }
    case SRC_Q8_0:
      o->raw_d = load16(p);
      for (int i = 0; i < 32; i++) o->q[i] = static_cast<int8_t>(p[2 + i]);
      o->d[0] = o->d[1] = f32_of_f16(o->raw_d);
      return;
    case SRC_Q2_K: {  // scales[16], qs[64], d, dmin
      float d = f32_of_f16(load16(p + 80)), dm = f32_of_f16(load16(p + 82));
      const uint8_t* n = p + 16 + (j / 4) * 32;
      for (int i = 0; i < 32; i++) o->q[i] = (n[i] >> (2 * (j & 3))) & 3;
      for (int h = 0; h < 2; h++) {
        o->d[h] = d * static_cast<float>(p[2 * j + h] & 15);
        o->m[h] = -(dm * static_cast<float>(p[2 * j + h] >> 4));
      }
      return;
    }
    case SRC_Q3_K: {  // hmask[32], qs[64], scales[12], d
      float d = f32_of_f16(load16(p + 108));
      const uint8_t *hm = p, *n = p + 32 + (j / 4) * 32, *s = p + 96;
      for (int i = 0; i < 32; i++) o->q[i] = ((n[i] >> (2 * (j & 3))) & 3) - (((hm[i] >> j) & 1) ? 0 : 4);
      for (int h = 0; h < 2; h++) {
        int k = 2 * j + h;
        int low = k < 8 ? s[k] & 15 : s[k - 8] >> 4;
        int high = (s[8 + (k & 3)] >> (2 * (k / 4))) & 3;
        o->d[h] = d * static_cast<float>((low | (high << 4)) - 32);
      }
      return;
    }
    case SRC_Q4_K:
    case SRC_Q5_K: {  // d, dmin, scales[12], (qh[32]), qs[128]
      float d = f32_of_f16(load16(p)), dm = f32_of_f16(load16(p + 2));
      int sc, mn;
      scale_min_k4(j, p + 4, &sc, &mn);
      bool five = type == SRC_Q5_K;
      const uint8_t* n = p + (five ? 48 : 16) + (j / 2) * 32;
      for (int i = 0; i < 32; i++) {
        o->q[i] = (j & 1) ? n[i] >> 4 : n[i] & 15;
        if (five) o->q[i] |= ((p[16 + i] >> j) & 1) << 4;
      }
      o->d[0] = o->d[1] = d * static_cast<float>(sc);
      o->m[0] = o->m[1] = -(dm * static_cast<float>(mn));
      return;
    }
    case SRC_Q6_K: {  // ql[128], qh[64], scales[16], d
      float d = f32_of_f16(load16(p + 208));
      const uint8_t* ql = p + (j / 4) * 64 + (j & 1) * 32;
      const uint8_t* qh = p + 128 + (j / 4) * 32;
      for (int i = 0; i < 32; i++) {
        int low = (j & 2) ? ql[i] >> 4 : ql[i] & 15;
        o->q[i] = (low | (((qh[i] >> (2 * (j & 3))) & 3) << 4)) - 32;
      }
      for (int h = 0; h < 2; h++) o->d[h] = d * static_cast<float>(static_cast<int8_t>(p[192 + 2 * j + h]));
      return;
    }
  }
}

float read_plain(int32_t type, const uint8_t* row, int64_t i) {
  if (type == SRC_F32) {
    float f;
    std::memcpy(&f, row + i * 4, 4);
    return f;
  }
  uint16_t h = load16(row + i * 2);
  return type == SRC_F16 ? f32_of_f16(h) : f32_of_bf16(h);
}

struct Form {
  int bits, offset;
  bool half, min;
  int groups;
};

Form form_of(int32_t kind) {
  switch (kind) {
    case TD_Q4_1: return {4, 0, true, true, 1};
    case TD_Q4_0: return {4, 8, true, false, 1};
    case TD_Q8_0: case TD_Q5_0: return {8, 128, true, false, 1};
    case TD_Q5_1: return {8, 128, true, true, 1};
    case TD_Q4_K: return {4, 0, false, true, 1};
    case TD_Q5_K: return {8, 128, false, true, 1};
    case TD_Q6_K: return {8, 128, false, false, 2};
    case TD_Q2_K: return {4, 0, false, true, 2};
    case TD_Q3_K: return {4, 8, false, false, 2};
    case TD_Q8_C: return {8, 128, false, false, 1};
  }
  return {0, 0, false, false, 0};
}

int64_t tile_bytes(const Form& f) { return 64 * f.bits + f.groups * 16 * (f.half ? 2 : 4) * (f.min ? 2 : 1); }

// Where weight i (0..31) of output lane l stands in a tile's payload: byte, and high nibble or not.
inline int64_t place8(int l, int i) { return (i / 4) * 64 + l * 4 + i % 4; }
inline int64_t place4(int l, int i) { return (i / 8) * 64 + l * 4 + i % 4; }

void put_block(const Form& f, const Block& b, int lane, uint8_t* t) {
  for (int i = 0; i < 32; i++) {
    int u = b.q[i] + f.offset;
    if (f.bits == 8)
      t[place8(lane, i)] = static_cast<uint8_t>(u);
    else
      t[place4(lane, i)] |= static_cast<uint8_t>((i & 4) ? u << 4 : u);
  }
  uint8_t* s = t + 64 * f.bits;
  int width = f.half ? 2 : 4;
  for (int g = 0; g < f.groups; g++) {
    std::memcpy(s + (g * 16 + lane) * width, f.half ? static_cast<const void*>(&b.raw_d) : &b.d[g], width);
    if (f.min)
      std::memcpy(s + ((f.groups + g) * 16 + lane) * width, f.half ? static_cast<const void*>(&b.raw_m) : &b.m[g], width);
  }
}

// s8 weights with one scale per 32 from fp32 values (for sources that have no blocks of their own).
void quantise_block(const float* x, Block* o) {
  float top = 0.0f;
  for (int i = 0; i < 32; i++) top = x[i] > top ? x[i] : (-x[i] > top ? -x[i] : top);
  float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
  for (int i = 0; i < 32; i++) o->q[i] = static_cast<int>(__builtin_rintf(x[i] * inverse));
  o->d[0] = o->d[1] = inverse == 0.0f ? 0.0f : top / 127.0f;
  o->m[0] = o->m[1] = 0.0f;
}

struct Pack {
  int32_t type, kind;
  const uint8_t* src;
  int64_t row_bytes, n, k, k_have;
  const int32_t* rows;
  uint8_t* dst;
};

bool quantised(int32_t type) { return type != SRC_F32 && type != SRC_F16 && type != SRC_BF16 && type != SRC_I8_ROW; }

void block_values(const Pack& p, const uint8_t* row, int64_t b, float* out) {
  if (quantised(p.type)) {
    Block block;
    read_block(p.type, row, b, &block);
    for (int i = 0; i < 32; i++)
      out[i] = block.d[i / 16] * static_cast<float>(block.q[i]) + block.m[i / 16];
    return;
  }
  for (int i = 0; i < 32; i++) {
    int64_t at = b * 32 + i;
    if (p.type == SRC_I8_ROW) {
      float d;
      std::memcpy(&d, row, 4);
      out[i] = at < p.k_have ? d * static_cast<float>(static_cast<int8_t>(row[4 + at])) : 0.0f;
    } else {
      out[i] = at < p.k_have ? read_plain(p.type, row, at) : 0.0f;
    }
  }
}

void pack_lane(const Pack& p, const uint8_t* row, int lane, uint8_t* column) {
  float values[32];
  for (int64_t b = 0; b < p.k / 32; b++) {
    if (p.kind == TD_F32 || p.kind == TD_BF16) {
      block_values(p, row, b, values);
      for (int i = 0; i < 32; i++) {
        int64_t k = b * 32 + i;
        if (p.kind == TD_F32)
          reinterpret_cast<float*>(column)[k * 16 + lane] = values[i];
        else
          reinterpret_cast<uint16_t*>(column)[(k / 2) * 32 + lane * 2 + (k & 1)] = bf16_of_f32(values[i]);
      }
      continue;
    }
    Form f = form_of(p.kind);
    Block block;
    if (p.type == SRC_I8_ROW) {
      std::memcpy(&block.d[0], row, 4);
      block.d[1] = block.d[0];
      block.m[0] = block.m[1] = 0.0f;
      for (int i = 0; i < 32; i++)
        block.q[i] = b * 32 + i < p.k_have ? static_cast<int8_t>(row[4 + b * 32 + i]) : 0;
    } else if (quantised(p.type)) {
      read_block(p.type, row, b, &block);
    } else {
      block_values(p, row, b, values);
      quantise_block(values, &block);
    }
    put_block(f, block, lane, column + b * tile_bytes(f));
  }
}

// The tile kind that holds a source type exactly; plain sources are exact in fp32 and (bf16) bf16 only.
int32_t exact_kind(int32_t type) {
  switch (type) {
    case SRC_F32: case SRC_F16: return TD_F32;
    case SRC_BF16: return TD_BF16;
    case SRC_Q4_0: return TD_Q4_0;
    case SRC_Q4_1: return TD_Q4_1;
    case SRC_Q5_0: return TD_Q5_0;
    case SRC_Q5_1: return TD_Q5_1;
    case SRC_Q8_0: return TD_Q8_0;
    case SRC_Q2_K: return TD_Q2_K;
    case SRC_Q3_K: return TD_Q3_K;
    case SRC_Q4_K: return TD_Q4_K;
    case SRC_Q5_K: return TD_Q5_K;
    case SRC_Q6_K: return TD_Q6_K;
    case SRC_I8_ROW: return TD_Q8_C;
  }
  return -1;
}

}  // namespace

namespace td {

int64_t column_bytes(int32_t kind, int64_t k) {
  if (kind == TD_F32) return k * 64;
  if (kind == TD_BF16) return k * 32;
  return k / 32 * tile_bytes(form_of(kind));
}

int32_t activation_need(int32_t kind) {
  if (kind == TD_F32) return TD_NEED_F32;
  if (kind == TD_BF16) return kernels()->needs_bf16 ? TD_NEED_BF16 : TD_NEED_F32;
  return TD_NEED_I8;
}

void unpack_row(const TdWeight& w, int64_t row, float* out) {
  const uint8_t* column = w.data + row / 16 * column_bytes(w.kind, w.k);
  const int lane = static_cast<int>(row % 16);
  if (w.kind == TD_F32) {
    for (int64_t i = 0; i < w.k; i++) out[i] = reinterpret_cast<const float*>(column)[i * 16 + lane];
    return;
  }
  if (w.kind == TD_BF16) {
    for (int64_t i = 0; i < w.k; i++)
      out[i] = f32_of_bf16(reinterpret_cast<const uint16_t*>(column)[(i / 2) * 32 + lane * 2 + (i & 1)]);
    return;
  }
  const Form f = form_of(w.kind);
  const int width = f.half ? 2 : 4;
  for (int64_t b = 0; b < w.k / 32; b++, out += 32) {
    const uint8_t* t = column + b * tile_bytes(f);
    const uint8_t* s = t + 64 * f.bits;
    float d[2], m[2] = {0.0f, 0.0f};
    for (int g = 0; g < 2; g++) {
      int h = f.groups == 2 ? g : 0;
      const uint8_t* pd = s + (h * 16 + lane) * width;
      const uint8_t* pm = s + ((f.groups + h) * 16 + lane) * width;
      if (f.half) {
        d[g] = f32_of_f16(load16(pd));
        if (f.min) m[g] = f32_of_f16(load16(pm));
      } else {
        std::memcpy(&d[g], pd, 4);
        if (f.min) std::memcpy(&m[g], pm, 4);
      }
    }
    for (int i = 0; i < 32; i++) {
      int u = f.bits == 8 ? t[place8(lane, i)] : (i & 4) ? t[place4(lane, i)] >> 4 : t[place4(lane, i)] & 15;
      out[i] = d[i / 16] * static_cast<float>(u - f.offset) + m[i / 16];
    }
  }
}

}  // namespace td

TD_API int32_t td_exact_kind(int32_t source_type) { return exact_kind(source_type); }

// Packs n rows of a source into tiles. rows: source row of each output row, or null; k: padded length (multiple of 32),
// k_have: what the source has. dst holds ceil(n / 16) * column_bytes. Returns -1 if the source can't become the kind.
TD_API int32_t td_pack(int32_t type, int32_t kind, const uint8_t* src, int64_t row_bytes, int64_t n, int64_t k,
                       int64_t k_have, const int32_t* rows, uint8_t* dst) {
  if (k % 32 || kind < 0 || kind >= TD_KINDS || source_info(type).bytes == 0) return -1;
  bool plain_target = kind == TD_F32 || kind == TD_BF16;
  bool requantised = kind == TD_Q8_C && !quantised(type);
  if (!plain_target && !requantised && exact_kind(type) != kind) return -1;
  if (quantised(type) && k != k_have) return -1;
  Pack p = {type, kind, src, row_bytes, n, k, k_have, rows, dst};
  struct Job {
    Pack p;
    std::shared_ptr<td::Pool> pool;
  } job = {p, td::pool()};
  job.pool->run(
      [](void* c, int thread) {
        auto* j = static_cast<Job*>(c);
        const Pack& q = j->p;
        const int64_t bytes = td::column_bytes(q.kind, q.k);
        j->pool->phase(thread, (q.n + 15) / 16, 4, [&](int64_t a, int64_t b) {
          for (int64_t t = a; t < b; t++) {
            uint8_t* column = q.dst + t * bytes;
            std::memset(column, 0, static_cast<size_t>(bytes));
            for (int lane = 0; lane < 16 && t * 16 + lane < q.n; lane++) {
              int64_t row = t * 16 + lane;
              pack_lane(q, q.src + (q.rows ? q.rows[row] : row) * q.row_bytes, lane, column);
            }
          }
        });
      },
      &job);
  return 0;
}
