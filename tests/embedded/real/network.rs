//! Pods with a network of their own, through the services. Spec 09a §2, 09b §11, §14.

use super::*;

/// The same pod with a network of its own.
pub fn with_network(mut pod: cri::PodSandboxConfig) -> cri::PodSandboxConfig {
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("there");
    context.namespace_options.as_mut().expect("there").network = cri::NamespaceMode::Pod.into();
    pod
}
