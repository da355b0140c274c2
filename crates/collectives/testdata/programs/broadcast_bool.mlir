module @broadcast attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xi1>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<6xi1> {
    %0 = stablehlo.convert %arg0 : (tensor<6xi1>) -> tensor<6xui8>
    %1 = stablehlo.compare EQ, %arg1, %arg2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = stablehlo.constant dense<0> : tensor<6xui8>
    %3 = stablehlo.select %1, %0, %2 : tensor<i1>, tensor<6xui8>
    %4 = "stablehlo.all_reduce"(%3) ({
    ^bb0(%a: tensor<ui8>, %b: tensor<ui8>):
      %c = stablehlo.add %a, %b : tensor<ui8>
      stablehlo.return %c : tensor<ui8>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xui8>) -> tensor<6xui8>
    %5 = stablehlo.convert %4 : (tensor<6xui8>) -> tensor<6xi1>
    return %5 : tensor<6xi1>
  }
}
