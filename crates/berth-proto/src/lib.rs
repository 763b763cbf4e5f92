//! Types generated from `proto/`.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "generated from the published field tables")]
#![allow(clippy::all, reason = "generated code")]

/// Metadata of an ExecSync call: how many bytes of each output its caller wants. Other runtimes ignore it.
pub const OUTPUT_LIMIT: &str = "berth-output-limit";

/// Shows the value of an environment variable.
fn as_text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

/// The container runtime interface, `runtime.v1`.
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// containerd's native events service.
pub mod containerd_events {
    tonic::include_proto!("containerd.services.events.v1");
}

/// The health service of gRPC.
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// The pod-resources socket, version 1.
pub mod pod_resources {
    tonic::include_proto!("v1");
}

/// The local sockets that are still called alpha: pod-resources and pods.
pub mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// How plugins register, version 1.
pub mod plugin_registration {
    tonic::include_proto!("pluginregistration");
}

/// The container storage interface, `csi.v1`.
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Profiles as `pprof` reads them.
pub mod profile {
    tonic::include_proto!("perftools.profiles");
}

/// What a pod of the API looks like in protobuf: an encoded `FileDescriptorSet`.
pub const POD_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/core-v1-pod.bin"));
