//! Rejects references of static pods to API objects. Pure. Implements spec 02a §1.5.

use berth_types::{api, fieldpath::quoted};

/// Rule for references of static pods (gate `PreventStaticPodAPIReferences`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReferenceRule {
    /// Gate on: every reference to an API object is rejected.
    RefuseAll,
    /// Gate off: only ClusterTrustBundles and ResourceClaims are rejected; they cannot work without the
    /// API server.
    RefuseUnusable,
}

/// Why the references of a pod are rejected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The pod refers to that resource.
    #[error("static pods may not reference {0}")]
    Refers(&'static str),
    /// A projected volume has an unknown source.
    #[error("unknown source for projected volume {}", quoted(.0))]
    UnknownProjection(String),
    /// Gate off: a projected ClusterTrustBundle.
    #[error("static pods may not use ClusterTrustBundle projected volume sources")]
    TrustBundle,
    /// Gate off: resource claims.
    #[error("static pods may not use ResourceClaims")]
    Claims,
}

/// Checks a pod by that rule; the first match in the documented order wins.
///
/// # Errors
/// The rejected reference.
pub fn check(spec: &api::PodSpec, rule: ReferenceRule) -> Result<(), ReferenceError> {
    match rule {
        ReferenceRule::RefuseAll => refuse_all(spec),
        ReferenceRule::RefuseUnusable => refuse_unusable(spec),
    }
}

fn refuse_all(spec: &api::PodSpec) -> Result<(), ReferenceError> {
    let refers = |what| Err(ReferenceError::Refers(what));
    if spec.service_account_name.as_deref().is_some_and(|name| !name.is_empty()) {
        return refers("serviceaccounts");
    }
    let environments = environments(spec);
    if spec.image_pull_secrets.as_ref().is_some_and(|list| !list.is_empty())
        || environments.iter().any(Environment::has_secret)
        || volumes(spec).any(has_secret)
    {
        return refers("secrets");
    }
    if environments.iter().any(Environment::has_config_map) || volumes(spec).any(has_config_map) {
        return refers("configmaps");
    }
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return refers("resourceclaims");
    }
    volumes(spec).try_for_each(volume)
}

fn refuse_unusable(spec: &api::PodSpec) -> Result<(), ReferenceError> {
    if volumes(spec).flat_map(projections).any(|source| source.cluster_trust_bundle.is_some()) {
        return Err(ReferenceError::TrustBundle);
    }
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return Err(ReferenceError::Claims);
    }
    Ok(())
}

struct Environment<'a> {
    variables: &'a [api::EnvVar],
    from: &'a [api::EnvFromSource],
}

impl Environment<'_> {
    fn has_secret(&self) -> bool {
        self.from.iter().any(|from| from.secret_ref.is_some())
            || self.values().any(|value| value.secret_key_ref.is_some())
    }

    fn has_config_map(&self) -> bool {
        self.from.iter().any(|from| from.config_map_ref.is_some())
            || self.values().any(|value| value.config_map_key_ref.is_some())
    }

    fn values(&self) -> impl Iterator<Item = &api::EnvVarSource> {
        self.variables.iter().filter_map(|variable| variable.value_from.as_ref())
    }
}

/// The environments of all containers: init, regular, ephemeral.
fn environments(spec: &api::PodSpec) -> Vec<Environment<'_>> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| Environment {
        variables: c.env.as_deref().unwrap_or_default(),
        from: c.env_from.as_deref().unwrap_or_default(),
    });
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| Environment {
        variables: c.env.as_deref().unwrap_or_default(),
        from: c.env_from.as_deref().unwrap_or_default(),
    });
    containers.chain(ephemeral).collect()
}

fn volumes(spec: &api::PodSpec) -> impl Iterator<Item = &api::Volume> {
    spec.volumes.iter().flatten()
}

fn projections(volume: &api::Volume) -> impl Iterator<Item = &api::VolumeProjection> {
    volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten())
}

fn has_secret(v: &api::Volume) -> bool {
    v.secret.is_some()
        || v.azure_file.as_ref().is_some_and(|s| !s.secret_name.is_empty())
        || v.cephfs.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.cinder.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.flex_volume.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.rbd.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.scale_io.is_some()
        || v.iscsi.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.storageos.as_ref().is_some_and(|s| s.secret_ref.is_some())
        || v.csi.as_ref().is_some_and(|s| s.node_publish_secret_ref.is_some())
        || projections(v).any(|source| source.secret.is_some())
}

fn has_config_map(v: &api::Volume) -> bool {
    v.config_map.is_some() || projections(v).any(|source| source.config_map.is_some())
}

fn volume(v: &api::Volume) -> Result<(), ReferenceError> {
    let refers = |what| Err(ReferenceError::Refers(what));
    if v.csi.is_some() {
        return refers("csidrivers (via CSI volumes)");
    }
    if v.glusterfs.is_some() {
        return refers("endpoints (via glusterFS volumes)");
    }
    if v.persistent_volume_claim.is_some() {
        return refers("persistentvolumeclaims");
    }
    if v.ephemeral.is_some() {
        return refers("persistentvolumeclaims (via ephemeral volumes)");
    }
    if v.azure_file.is_some() {
        return refers("secrets (via azureFile volumes)");
    }
    for source in projections(v) {
        if source.service_account_token.is_some() {
            return refers("serviceaccounts (via projected volumes)");
        }
        if source.cluster_trust_bundle.is_some() {
            return refers("clustertrustbundles");
        }
        if source.pod_certificate.is_some() {
            return refers("podcertificates");
        }
        if source.downward_api.is_none() {
            return Err(ReferenceError::UnknownProjection(v.name.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn error_text(spec: Value, rule: ReferenceRule) -> String {
        let mut spec = spec;
        if spec.get("containers").is_none() {
            spec["containers"] = json!([{"name": "c"}]);
        }
        let spec: api::PodSpec = serde_json::from_value(spec).expect("a spec");
        check(&spec, rule).map_or_else(|e| e.to_string(), |()| String::new())
    }

    fn with_volume(source: Value) -> Value {
        let mut volume = source;
        volume["name"] = "v".into();
        json!({"volumes": [volume]})
    }

    #[test]
    fn references_are_refused_by_name() {
        let with_env = |env: Value| json!({"containers": [{"name": "c", "env": [{"name": "A", "valueFrom": env}]}]});
        for (spec, what) in [
            (json!({"serviceAccountName": "sa", "imagePullSecrets": [{"name": "s"}]}), "serviceaccounts"),
            (json!({"imagePullSecrets": [{"name": "s"}]}), "secrets"),
            // AC-02a-3
            (json!({"containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "s"}}]}]}), "secrets"),
            (with_env(json!({"secretKeyRef": {"name": "s", "key": "k"}})), "secrets"),
            (json!({"initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "s"}}]}]}), "secrets"),
            (with_volume(json!({"secret": {"secretName": "s"}})), "secrets"),
            (with_volume(json!({"projected": {"sources": [{"secret": {"name": "s"}}]}})), "secrets"),
            (with_volume(json!({"azureFile": {"secretName": "s", "shareName": "x"}})), "secrets"),
            (with_volume(json!({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}})), "secrets"),
            (with_env(json!({"configMapKeyRef": {"name": "s", "key": "k"}})), "configmaps"),
            (with_volume(json!({"configMap": {"name": "s"}})), "configmaps"),
            (with_volume(json!({"projected": {"sources": [{"configMap": {"name": "s"}}]}})), "configmaps"),
            (json!({"resourceClaims": [{"name": "r"}]}), "resourceclaims"),
            (with_volume(json!({"csi": {"driver": "d"}})), "csidrivers (via CSI volumes)"),
            (with_volume(json!({"glusterfs": {"endpoints": "e", "path": "p"}})), "endpoints (via glusterFS volumes)"),
            (with_volume(json!({"persistentVolumeClaim": {"claimName": "c"}})), "persistentvolumeclaims"),
            (with_volume(json!({"ephemeral": {}})), "persistentvolumeclaims (via ephemeral volumes)"),
            (
                with_volume(json!({"azureFile": {"secretName": "", "shareName": "x"}})),
                "secrets (via azureFile volumes)",
            ),
            (
                with_volume(json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}})),
                "serviceaccounts (via projected volumes)",
            ),
            (
                with_volume(json!({"projected": {"sources": [{"clusterTrustBundle": {"path": "t"}}]}})),
                "clustertrustbundles",
            ),
            (
                with_volume(
                    json!({"projected": {"sources": [{"podCertificate": {"signerName": "s", "keyType": "k"}}]}}),
                ),
                "podcertificates",
            ),
        ] {
            let error = error_text(spec.clone(), ReferenceRule::RefuseAll);
            assert_eq!(error, format!("static pods may not reference {what}"), "{spec}");
        }
        let unknown = with_volume(json!({"projected": {"sources": [{}]}}));
        assert_eq!(error_text(unknown, ReferenceRule::RefuseAll), "unknown source for projected volume \"v\"");
    }

    #[test]
    fn local_volumes_are_allowed() {
        for source in [
            json!({"emptyDir": {}}),
            json!({"hostPath": {"path": "/x"}}),
            json!({"downwardAPI": {}}),
            json!({"projected": {"sources": [{"downwardAPI": {}}]}}),
            json!({"image": {"reference": "a"}}),
            json!({"nfs": {"server": "s", "path": "/p"}}),
            json!({"iscsi": {"targetPortal": "p", "iqn": "i", "lun": 0}}),
        ] {
            assert_eq!(error_text(with_volume(source.clone()), ReferenceRule::RefuseAll), "", "{source}");
        }
    }

    #[test]
    fn with_the_gate_off_only_the_unusable_is_refused() {
        let bundle = with_volume(json!({"projected": {"sources": [{"clusterTrustBundle": {"path": "t"}}]}}));
        assert_eq!(
            error_text(bundle, ReferenceRule::RefuseUnusable),
            "static pods may not use ClusterTrustBundle projected volume sources"
        );
        let claims = json!({"resourceClaims": [{"name": "r"}]});
        assert_eq!(error_text(claims, ReferenceRule::RefuseUnusable), "static pods may not use ResourceClaims");
        assert_eq!(error_text(with_volume(json!({"secret": {"secretName": "s"}})), ReferenceRule::RefuseUnusable), "");
    }
}
