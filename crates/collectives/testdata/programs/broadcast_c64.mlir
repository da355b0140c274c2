module @broadcast attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xcomplex<f32>>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<6xcomplex<f32>> {
    %0 = stablehlo.real %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %1 = stablehlo.reshape %0 : (tensor<6xf32>) -> tensor<1x6xf32>
    %2 = stablehlo.imag %arg0 : (tensor<6xcomplex<f32>>) -> tensor<6xf32>
    %3 = stablehlo.reshape %2 : (tensor<6xf32>) -> tensor<1x6xf32>
    %4 = stablehlo.concatenate %1, %3, dim = 1 : (tensor<1x6xf32>, tensor<1x6xf32>) -> tensor<1x12xf32>
    %5 = stablehlo.reshape %4 : (tensor<1x12xf32>) -> tensor<12xf32>
    %6 = stablehlo.bitcast_convert %5 : (tensor<12xf32>) -> tensor<12xui32>
    %7 = stablehlo.compare EQ, %arg1, %arg2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %8 = stablehlo.constant dense<0> : tensor<12xui32>
    %9 = stablehlo.select %7, %6, %8 : tensor<i1>, tensor<12xui32>
    %10 = "stablehlo.all_reduce"(%9) ({
    ^bb0(%a: tensor<ui32>, %b: tensor<ui32>):
      %c = stablehlo.add %a, %b : tensor<ui32>
      stablehlo.return %c : tensor<ui32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<12xui32>) -> tensor<12xui32>
    %11 = stablehlo.bitcast_convert %10 : (tensor<12xui32>) -> tensor<12xf32>
    %12 = stablehlo.slice %11 [0:6] : (tensor<12xf32>) -> tensor<6xf32>
    %13 = stablehlo.slice %11 [6:12] : (tensor<12xf32>) -> tensor<6xf32>
    %14 = stablehlo.complex %12, %13 : tensor<6xcomplex<f32>>
    return %14 : tensor<6xcomplex<f32>>
  }
}
