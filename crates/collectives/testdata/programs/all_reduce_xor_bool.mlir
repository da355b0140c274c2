module @all_reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xi1>) -> tensor<6xi1> {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<i1>, %b: tensor<i1>):
      %c = stablehlo.xor %a, %b : tensor<i1>
      stablehlo.return %c : tensor<i1>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xi1>) -> tensor<6xi1>
    return %0 : tensor<6xi1>
  }
}
