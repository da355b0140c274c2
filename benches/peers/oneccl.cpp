// Times collectives of oneCCL on the CPU: `mpirun -n 2 oneccl <operation> <dtype> <size>...`;
// one line a size, "<bytes> <microseconds>". MPI only brings the ranks together.
#include <mpi.h>

#include <memory>
#include <oneapi/ccl.hpp>
#include <string>

#include "loop.h"

namespace {

struct State {
  std::string operation;
  ccl::datatype type;
  size_t width;
  ccl::communicator* group;
  char *input, *output;
  size_t bytes;
  size_t ranks;
};

void call(void* pointer) {
  auto& s = *static_cast<State*>(pointer);
  const size_t count = s.bytes / s.width, part = count / s.ranks;
  const auto sum = ccl::reduction::sum;
  if (s.operation == "all_reduce") {
    ccl::allreduce(s.input, s.input, count, s.type, sum, *s.group).wait();
  } else if (s.operation == "all_gather") {
    ccl::allgather(s.input, s.output, part, s.type, *s.group).wait();
  } else if (s.operation == "reduce_scatter") {
    ccl::reduce_scatter(s.input, s.output, part, s.type, sum, *s.group).wait();
  } else if (s.operation == "all_to_all") {
    ccl::alltoall(s.input, s.output, part, s.type, *s.group).wait();
  } else if (s.operation == "broadcast") {
    ccl::broadcast(s.input, count, s.type, 0, *s.group).wait();
  } else {
    ccl::barrier(*s.group);
  }
}

void share(void* /*state*/, long* number) {
  MPI_Bcast(number, 1, MPI_LONG, 0, MPI_COMM_WORLD);
}

} // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  ccl::init();
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  ccl::shared_ptr_class<ccl::kvs> store;
  ccl::kvs::address_type address;
  if (rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank != 0) {
    store = ccl::create_kvs(address);
  }
  {
    auto group = ccl::create_communicator(ranks, rank, store);
    const bool half = std::string(argv[2]) == "bfloat16";
    State s{
        argv[1], half ? ccl::datatype::bfloat16 : ccl::datatype::float32,
        half ? 2U : 4U, &group, nullptr, nullptr, 0, static_cast<size_t>(ranks)};
    for (int i = 3; i < argc; ++i) {
      const size_t unit = s.width * s.ranks;
      s.bytes = (parse_size(argv[i]) + unit - 1) / unit * unit;
      s.input = static_cast<char*>(filled(s.bytes));
      s.output = static_cast<char*>(filled(s.bytes));
      const double time = measure_us(call, share, &s);
      if (rank == 0) {
        printf("%zu %.3f\n", s.bytes, time);
        fflush(stdout);
      }
      free(s.input);
      free(s.output);
    }
  }
  MPI_Finalize();
  return 0;
}
