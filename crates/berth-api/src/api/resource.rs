//! Resource types and their REST paths. Pure.
//!
//! Implements spec 10 §4.

/// API resource type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Resource {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Version within the group; empty for a path that serves no objects.
    pub version: &'static str,
    /// Plural name, as in REST paths.
    pub plural: &'static str,
    /// Kind, as in objects.
    pub kind: &'static str,
}

impl Resource {
    /// `Node`.
    pub const NODES: Self = Self::core("nodes", "Node");
    /// `Pod`.
    pub const PODS: Self = Self::core("pods", "Pod");
    /// `ConfigMap`.
    pub const CONFIG_MAPS: Self = Self::core("configmaps", "ConfigMap");
    /// `Secret`.
    pub const SECRETS: Self = Self::core("secrets", "Secret");
    /// `Service`.
    pub const SERVICES: Self = Self::core("services", "Service");
    /// `ServiceAccount`.
    pub const SERVICE_ACCOUNTS: Self = Self::core("serviceaccounts", "ServiceAccount");
    /// `Event` of the core group.
    pub const EVENTS: Self = Self::core("events", "Event");
    /// `PersistentVolumeClaim`.
    pub const CLAIMS: Self = Self::core("persistentvolumeclaims", "PersistentVolumeClaim");
    /// `PersistentVolume`.
    pub const VOLUMES: Self = Self::core("persistentvolumes", "PersistentVolume");
    /// `Lease`.
    pub const LEASES: Self = Self::new("coordination.k8s.io", "v1", "leases", "Lease");
    /// `RuntimeClass`.
    pub const RUNTIME_CLASSES: Self = Self::new("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass");
    /// `CSIDriver`.
    pub const CSI_DRIVERS: Self = Self::new("storage.k8s.io", "v1", "csidrivers", "CSIDriver");
    /// `CSINode`: the CSI drivers registered on a node.
    pub const CSI_NODES: Self = Self::new("storage.k8s.io", "v1", "csinodes", "CSINode");
    /// `VolumeAttachment`.
    pub const ATTACHMENTS: Self = Self::new("storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment");
    /// `CertificateSigningRequest`.
    pub const SIGNING_REQUESTS: Self =
        Self::new("certificates.k8s.io", "v1", "certificatesigningrequests", "CertificateSigningRequest");
    /// `PodCertificateRequest`.
    pub const POD_CERTIFICATES: Self =
        Self::new("certificates.k8s.io", "v1beta1", "podcertificaterequests", "PodCertificateRequest");
    /// `ClusterTrustBundle`.
    pub const TRUST_BUNDLES: Self =
        Self::new("certificates.k8s.io", "v1beta1", "clustertrustbundles", "ClusterTrustBundle");
    /// `ClusterTrustBundle` of older servers.
    pub const TRUST_BUNDLES_ALPHA: Self =
        Self::new("certificates.k8s.io", "v1alpha1", "clustertrustbundles", "ClusterTrustBundle");
    /// `ResourceSlice` of dynamic resource allocation.
    pub const RESOURCE_SLICES: Self = Self::new("resource.k8s.io", "v1", "resourceslices", "ResourceSlice");
    /// `ResourceClaim` of dynamic resource allocation.
    pub const RESOURCE_CLAIMS: Self = Self::new("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim");
    /// `TokenReview`: authenticates a token.
    pub const TOKEN_REVIEWS: Self = Self::new("authentication.k8s.io", "v1", "tokenreviews", "TokenReview");
    /// `SubjectAccessReview`: authorizes a request.
    pub const ACCESS_REVIEWS: Self =
        Self::new("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview");

    /// Health endpoint: serves no object and answers in plain text.
    pub const HEALTHZ: Self = Self::page("healthz");

    /// Discovery document of `certificates.k8s.io/v1beta1`.
    pub const CERTIFICATES_V1BETA1: Self = Self::page("apis/certificates.k8s.io/v1beta1");
    /// Discovery document of `certificates.k8s.io/v1alpha1`, for older servers.
    pub const CERTIFICATES_V1ALPHA1: Self = Self::page("apis/certificates.k8s.io/v1alpha1");

    /// Returns the resource type of these names.
    pub const fn new(group: &'static str, version: &'static str, plural: &'static str, kind: &'static str) -> Self {
        Self { group, version, plural, kind }
    }

    /// Path at the root that serves no object and therefore has no version.
    const fn page(plural: &'static str) -> Self {
        Self::new("", "", plural, "")
    }

    const fn core(plural: &'static str, kind: &'static str) -> Self {
        Self::new("", "v1", plural, kind)
    }

    /// `apiVersion` of its objects.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Path below the server's prefix; `namespace`, `name` and `subresource` may be empty.
    pub fn path(&self, namespace: &str, name: &str, subresource: &str) -> String {
        if self.version.is_empty() {
            return format!("/{}", self.plural);
        }
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let mut path = format!("{root}/{}", self.api_version());
        if !namespace.is_empty() {
            path.extend(["/namespaces/", namespace]);
        }
        path.extend(["/", self.plural]);
        for part in [name, subresource].into_iter().filter(|part| !part.is_empty()) {
            path.extend(["/", part]);
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        for (resource, [namespace, name, subresource], expected) in [
            (Resource::NODES, ["", "n", "status"], "/api/v1/nodes/n/status"),
            (Resource::PODS, ["ns", "p", ""], "/api/v1/namespaces/ns/pods/p"),
            (Resource::PODS, ["", "", ""], "/api/v1/pods"),
            (Resource::HEALTHZ, ["", "", ""], "/healthz"),
            (
                Resource::LEASES,
                ["kube-node-lease", "", ""],
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
            ),
        ] {
            assert_eq!(resource.path(namespace, name, subresource), expected);
        }
        assert_eq!(
            (Resource::PODS.api_version(), Resource::LEASES.api_version()),
            ("v1".into(), "coordination.k8s.io/v1".into())
        );
    }
}
