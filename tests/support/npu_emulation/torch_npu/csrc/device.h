// The device interface that torch requires: current device, streams, events, generators, pinned
// memory.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "aliases.h"

namespace emulation {

inline std::atomic<int64_t> next_stream{1};
inline thread_local std::array<int64_t, MOST_DEVICES> current_streams{};

struct Event {
  double recorded_ms = 0;
};

inline double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

inline void require_device(c10::Device device) {
  TORCH_CHECK(device.index() < num_devices(), "Invalid device ID ", static_cast<int>(device.index()),
              ": there are ", num_devices(), " NPUs");
}

// Work is done when its call returns, so streams and events are ordered and never have to wait.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device named(c10::Device device) {
    return device.has_index() ? device : c10::Device(NPU, current_device);
  }

  c10::DeviceType type() const override { return NPU; }
  c10::Device getDevice() const override { return {NPU, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    require_device(device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  c10::Stream getStream(c10::Device device) const override {
    const auto which = named(device);
    return c10::Stream(c10::Stream::UNSAFE, which, current_streams[which.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, named(device));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, named(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->recorded_ms = now_ms();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->recorded_ms - static_cast<Event*>(first)->recorded_ms;
  }
};

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(NPU, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline at::Generator& default_generator(int index) {
  static auto* kept = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < MOST_DEVICES; i++) {
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    }
    return made;
  }();
  return kept->at(index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  static int index_of(c10::DeviceIndex index) { return index < 0 ? current_device : index; }

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({NPU, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({NPU, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    const Block* block = books().find(address);
    return {NPU, static_cast<c10::DeviceIndex>(block ? block->device : current_device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_of(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index_of(index)));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator().allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) std::memcpy(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

inline Hooks& hooks() {
  static auto* kept = new Hooks;
  return *kept;
}

}  // namespace emulation
