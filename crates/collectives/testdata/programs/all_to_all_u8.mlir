module @all_to_all attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xui8>) -> tensor<6xui8> {
    %0 = "stablehlo.all_to_all"(%arg0) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, concat_dimension = 0 : i64, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, split_count = 2 : i64, split_dimension = 0 : i64} : (tensor<6xui8>) -> tensor<6xui8>
    return %0 : tensor<6xui8>
  }
}
