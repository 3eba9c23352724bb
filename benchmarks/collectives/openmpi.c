// One rank of Open MPI from C: compiled and started by main.ts, as rank.ts is.
// Rank 0 prints the times of every size as one line of JSON.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifndef OMPI_MAJOR_VERSION
#error "this mpicc is not Open MPI's"
#endif

// As in pattern.ts.
#define PERIOD 251

static int rank, ranks;

static void fill(float *data, size_t count) {
  for (size_t i = 0; i < count; i++) data[i] = (float)(i % PERIOD * (rank + 1) + rank);
}

static void require_sums(const float *data, size_t count, int operations) {
  float scale = 1;
  for (int i = 1; i < operations; i++) scale *= (float)ranks;
  for (size_t i = 0; i < count; i++) {
    float sum = (float)(i % PERIOD * (ranks * (ranks + 1) / 2) + ranks * (ranks - 1) / 2) * scale;
    if (data[i] == sum) continue;
    fprintf(stderr, "rank %d: wrong sum: element %zu of %zu is %g, not %g, after %d operations\n", rank, i, count,
            data[i], sum, operations);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

static void all_reduce(float *data, size_t count, size_t chunk) {
  for (size_t start = 0; start < count; start += chunk) {
    size_t length = count - start < chunk ? count - start : chunk;
    MPI_Allreduce(MPI_IN_PLACE, data + start, (int)length, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  if (memory != NULL) return memory;
  fprintf(stderr, "rank %d: no %zu bytes of memory\n", rank, bytes);
  MPI_Abort(MPI_COMM_WORLD, 1);
  return NULL;
}

static void measure(size_t bytes, int operations, int batches, size_t chunk) {
  size_t count = bytes / sizeof(float);
  float *data = allocate(bytes);
  double *microseconds = allocate(batches * sizeof *microseconds);
  for (int batch = 0; batch < batches; batch++) {
    fill(data, count);
    MPI_Barrier(MPI_COMM_WORLD);
    double started = now();
    for (int i = 0; i < operations; i++) all_reduce(data, count, chunk);
    microseconds[batch] = (now() - started) / operations;
    require_sums(data, count, operations);
  }
  MPI_Allreduce(MPI_IN_PLACE, microseconds, batches, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0) {
    printf("{\"bytes\":%zu,\"microseconds\":[", bytes);
    for (int batch = 0; batch < batches; batch++) printf("%s%.3f", batch > 0 ? "," : "", microseconds[batch]);
    printf("]}\n");
  }
  free(microseconds);
  free(data);
}

// Arguments: bytes of a chunk, and bytes:operations:batches of every size.
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  size_t chunk = strtoull(argv[1], NULL, 10) / sizeof(float);
  for (int i = 2; i < argc; i++) {
    size_t bytes;
    int operations, batches;
    if (sscanf(argv[i], "%zu:%d:%d", &bytes, &operations, &batches) != 3) {
      fprintf(stderr, "not bytes:operations:batches: %s\n", argv[i]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    measure(bytes, operations, batches, chunk);
  }
  MPI_Finalize();
  return 0;
}
