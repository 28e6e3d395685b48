// Addresses of paged, strided KV.

struct Cache {
  const char* base;
  int64_t block_stride, token_stride, head_stride;  // bytes
};

struct Batch {
  Cache key, value;
  const int32_t *tables, *contexts;
  int64_t table_stride;
  int sequences, heads, kv_heads, head_dim, block_size;
  int64_t query_stride, query_head_stride;  // elements
  float scale;
};

// strides: block, token and head strides of the key cache, then of the value cache, in bytes; then
// the query's token and head strides in elements; then the block table's row stride.
// shape: sequences, heads, kv_heads, head_dim, block_size.
static Batch make_batch(const void* key, const void* value, const int32_t* tables,
                        const int32_t* contexts, const int64_t* strides, const int64_t* shape,
                        float scale) {
  return {{(const char*)key, strides[0], strides[1], strides[2]},
          {(const char*)value, strides[3], strides[4], strides[5]},
          tables, contexts, strides[8],
          (int)shape[0], (int)shape[1], (int)shape[2], (int)shape[3], (int)shape[4],
          strides[6], strides[7], scale};
}

// Find the addresses of `count` tokens of a sequence and KV head, from token `first` on.
static void locate(const Batch& d, const Cache& cache, int sequence, int kv_head, int first,
                   int count, const char** rows) {
  const int32_t* table = d.tables + sequence * d.table_stride;
  const char* head = cache.base + kv_head * cache.head_stride;
  int block = first / d.block_size, offset = first % d.block_size;
  for (int t = 0; t < count; block++, offset = 0) {
    const int stop = std::min(count, t + d.block_size - offset);
    const char* row = head + table[block] * cache.block_stride + offset * cache.token_stride;
    for (; t < stop; t++, row += cache.token_stride) rows[t] = row;
  }
}
