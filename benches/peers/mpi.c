// Times collectives of an MPI: `mpirun -n 2 mpi <operation> <size>...`; one line a size,
// "<bytes> <microseconds>". Sizes are of the whole, as in the native benchmark of tpu_dist.
#include <mpi.h>

#include "loop.h"

struct State {
  const char* operation;
  char *input, *output;
  int bytes, ranks, rank;
};

static void call(void* pointer) {
  const struct State* s = pointer;
  const int count = s->bytes / 4, part = count / s->ranks;
  if (strcmp(s->operation, "all_reduce") == 0) {
    MPI_Allreduce(MPI_IN_PLACE, s->input, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (strcmp(s->operation, "all_gather") == 0) {
    MPI_Allgather(s->input, part, MPI_FLOAT, s->output, part, MPI_FLOAT, MPI_COMM_WORLD);
  } else if (strcmp(s->operation, "reduce_scatter") == 0) {
    MPI_Reduce_scatter_block(s->input, s->output, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (strcmp(s->operation, "all_to_all") == 0) {
    MPI_Alltoall(s->input, part, MPI_FLOAT, s->output, part, MPI_FLOAT, MPI_COMM_WORLD);
  } else if (strcmp(s->operation, "broadcast") == 0) {
    MPI_Bcast(s->input, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  } else if (strcmp(s->operation, "send_recv") == 0) {
    if (s->rank == 0) {
      MPI_Send(s->input, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
      MPI_Recv(s->output, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (s->rank == 1) {
      MPI_Recv(s->output, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      MPI_Send(s->input, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
    }
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

static void share(void* state, long* number) {
  (void)state;
  MPI_Bcast(number, 1, MPI_LONG, 0, MPI_COMM_WORLD);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  struct State s = {.operation = argv[1]};
  MPI_Comm_rank(MPI_COMM_WORLD, &s.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &s.ranks);
  for (int i = 2; i < argc; ++i) {
    const size_t unit = 4 * (size_t)s.ranks;
    const size_t bytes = (parse_size(argv[i]) + unit - 1) / unit * unit;
    s.bytes = (int)bytes;
    s.input = filled(bytes);
    s.output = filled(bytes);
    double time = measure_us(call, share, &s);
    if (strcmp(s.operation, "send_recv") == 0) {
      time /= 2;
    }
    if (s.rank == 0) {
      printf("%zu %.3f\n", bytes, time);
      fflush(stdout);
    }
    free(s.input);
    free(s.output);
  }
  MPI_Finalize();
  return 0;
}
