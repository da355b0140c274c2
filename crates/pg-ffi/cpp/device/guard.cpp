// Device guard, streams, events, and hooks.
//
// There is one device and one queue, in which everything runs in order. Streams are
// names for it; an event is a point in it.
#include <atomic>
#include <chrono>
#include <optional>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.hpp"
#include "generator.hpp"

namespace tpu_dist::device {

namespace {

void check(c10::DeviceIndex index) {
  TORCH_CHECK(
      index <= 0, "device: expected index 0, as a process has one device, got ",
      static_cast<int>(index));
}

thread_local c10::StreamId current_stream = 0;

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

c10::Stream new_stream() {
  static std::atomic<c10::StreamId> last{0};
  return stream(++last);
}

// A recorded event. One that tells time waits for its point when it is recorded.
struct Event {
  rust::Box<ffi::Marker> marker;
  std::optional<std::chrono::steady_clock::time_point> time;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDevice.type();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    check(device.index());
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    check(device.index());
  }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return ffi::is_available() ? 1 : 0;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    // The bits are in the order of this list.
    int bit = 0;
#define TPU_DIST_BIT(_, name)                                                       \
  if (element_of(at::ScalarType::name) != 0) {                                      \
    capability.capability_data.capability_bits |= uint64_t{1} << bit;               \
  }                                                                                 \
  ++bit;
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(TPU_DIST_BIT)
#undef TPU_DIST_BIT
    return capability;
  }

  c10::Stream getStream(c10::Device /*device*/) const override {
    return stream(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*priority*/) const override {
    return new_stream();
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return new_stream();
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return !ffi::is_opened() || call([] { return ffi::record(); })->is_complete();
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {
    call([] { ffi::synchronize(); });
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    check(index);
    call([] { ffi::synchronize(); });
  }

  void record(
      void** event,
      const c10::Stream& /*stream*/,
      c10::DeviceIndex /*index*/,
      c10::EventFlag flag) const override {
    auto marker = call([] { return ffi::record(); });
    std::optional<std::chrono::steady_clock::time_point> time;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      call([&] { marker->wait(); });
      time = std::chrono::steady_clock::now();
    }
    delete static_cast<Event*>(*event);
    *event = new Event{std::move(marker), time};
  }
  // What comes later in the queue runs later.
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->marker->is_complete();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      call([&] { static_cast<Event*>(event)->marker->wait(); });
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex /*index*/) const override {
    const auto time = [](void* event) {
      TORCH_CHECK(
          event != nullptr && static_cast<Event*>(event)->time.has_value(),
          "elapsed_time: expected two recorded events with enable_timing=True");
      return *static_cast<Event*>(event)->time;
    };
    return std::chrono::duration<double, std::milli>(time(end) - time(start)).count();
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  // Decides what torch takes where no device is named: FSDP2's mesh, for example.
  bool isAvailable() const override {
    return ffi::is_preferred();
  }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return ffi::is_opened();
  }
  void init() const override {
    register_kernels();
  }
  c10::DeviceIndex deviceCount() const override {
    return ffi::is_available() ? 1 : 0;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    check(index);
    return 0;
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    check(index);
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    check(index);
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

} // namespace

void register_guard() {
  // Both live until the process ends.
  static const c10::impl::DeviceGuardImplRegistrar registrar(kDevice.type(), new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

} // namespace tpu_dist::device
