// Device memory that is host memory: every byte is accounted to a device, fresh memory is poison.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

namespace emulation {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 16;
constexpr int64_t FORMAT_ND = 2;
constexpr size_t ALIGNMENT = 512;  // as torch_npu's allocator

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

inline int num_devices() {
  static const int count =
      std::clamp<int64_t>(setting("NPU_EMULATION_DEVICES", 4), 1, MOST_DEVICES);
  return count;
}

inline int64_t capacity() {
  static const int64_t bytes = setting("NPU_EMULATION_BYTES", int64_t{4} << 30);
  return bytes;
}

inline thread_local int current_device = 0;

// The record of one block of device memory.
struct Block {
  int64_t nbytes;
  int device;
  int64_t format;
};

// Accounts of device memory: blocks by address, bytes by device.
class Books {
 public:
  void require_room(int64_t nbytes, int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, used_[device] + round_up(nbytes) <= capacity(),
                     "NPU out of memory. Tried to allocate ", nbytes, " bytes. NPU ", device,
                     " has a total capacity of ", capacity(), " bytes of which ",
                     capacity() - used_[device], " bytes are free.");
  }

  void charge(void* address, int64_t nbytes, int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    used_[device] += round_up(nbytes);
    peak_[device] = std::max(peak_[device], used_[device]);
    blocks_[address] = {nbytes, device, FORMAT_ND};
  }

  void release(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    used_[found->second.device] -= round_up(found->second.nbytes);
    blocks_.erase(found);
  }

  // The block that begins at an address; nullptr for other memory.
  const Block* find(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(const_cast<void*>(address));
    return found == blocks_.end() ? nullptr : &found->second;
  }

  void set_format(const void* address, int64_t format) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(const_cast<void*>(address));
    TORCH_CHECK(found != blocks_.end(), "no device memory begins at ", address);
    found->second.format = format;
  }

  int64_t used(int device) { std::lock_guard<std::mutex> guard(mutex_); return used_[device]; }
  int64_t peak(int device) { std::lock_guard<std::mutex> guard(mutex_); return peak_[device]; }
  void reset_peak(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_[device] = used_[device];
  }

 private:
  static int64_t round_up(int64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::array<int64_t, MOST_DEVICES> used_{}, peak_{};
};

inline Books& books() {
  static auto* kept = new Books;  // outlives every tensor
  return *kept;
}

// Device memory. Fresh bytes are 0xFF: NaN in every floating type, -1 in every signed one.
struct DeviceAllocator final : c10::DeviceAllocator {
  static void give_back(void* address) {
    if (!address) return;
    books().release(address);
    std::free(address);
  }

  at::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(NPU, static_cast<c10::DeviceIndex>(current_device));
    if (nbytes == 0) return {nullptr, nullptr, &give_back, device};
    books().require_room(nbytes, current_device);
    void* address = std::aligned_alloc(ALIGNMENT, (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    TORCH_CHECK(address, "the host has no ", nbytes, " bytes left");
    books().charge(address, nbytes, current_device);
    std::memset(address, 0xFF, nbytes);
    return {address, address, &give_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = books().used(device);
    stats.allocated_bytes[0].peak = books().peak(device);
    stats.reserved_bytes[0] = stats.allocated_bytes[0];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { books().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {capacity() - books().used(device), capacity()};
  }
};

inline DeviceAllocator& device_allocator() {
  static auto* kept = new DeviceAllocator;
  return *kept;
}

// Page-locked host memory: plain memory that is recorded as pinned.
class PinnedAllocator final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    void* address = std::aligned_alloc(64, (nbytes + 63) / 64 * 64 + 64);
    TORCH_CHECK(address, "the host has no ", nbytes, " bytes left");
    std::lock_guard<std::mutex> guard(mutex());
    held()[address] = nbytes;
    return {address, address, &give_back, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  static bool holds(const void* address) {
    const char* wanted = static_cast<const char*>(address);
    std::lock_guard<std::mutex> guard(mutex());
    return std::any_of(held().begin(), held().end(), [&](const auto& each) {
      const char* start = static_cast<const char*>(each.first);
      return start <= wanted && wanted < start + std::max<size_t>(each.second, 1);
    });
  }

 private:
  static void give_back(void* address) {
    std::lock_guard<std::mutex> guard(mutex());
    held().erase(address);
    std::free(address);
  }
  static std::mutex& mutex() { static auto* kept = new std::mutex; return *kept; }
  static std::unordered_map<void*, size_t>& held() {
    static auto* kept = new std::unordered_map<void*, size_t>;
    return *kept;
  }
};

inline PinnedAllocator& pinned_allocator() {
  static auto* kept = new PinnedAllocator;
  return *kept;
}

}  // namespace emulation
