//! Topology translation for CSI migration: zone labels become the labels of the CSI driver. Pure.
//!
//! Node affinity on a zone label becomes affinity on the driver's label; a volume that has the label but no such
//! affinity gets it.

use std::collections::BTreeSet;

use super::{CINDER, EBS, GCE, VSPHERE};
use berth_types::api;

const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const OLD_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const OLD_REGION: &str = "failure-domain.beta.kubernetes.io/region";
/// Separator between several zones in a label.
const BETWEEN: &str = "__";

/// Returns the zones in the volume's labels.
pub fn labelled(volume: &api::PersistentVolume) -> Vec<&str> {
    let old = label(volume, OLD_ZONE).filter(|zones| !zones.is_empty());
    old.or_else(|| label(volume, ZONE)).map(|zones| zones.split(BETWEEN).collect()).unwrap_or_default()
}

fn label<'a>(volume: &'a api::PersistentVolume, key: &str) -> Option<&'a str> {
    volume.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Translates node affinity and labels to the topology keys of that driver.
pub fn translate(volume: &mut api::PersistentVolume, driver: &str) {
    let (zone, region) = topology_keys(volume);
    match driver {
        EBS => translate_key(volume, zone, "topology.ebs.csi.aws.com/zone", Some(BETWEEN)),
        GCE => translate_key(volume, zone, "topology.gke.io/zone", Some(BETWEEN)),
        CINDER => translate_key(volume, zone, "topology.cinder.csi.openstack.org/zone", Some(BETWEEN)),
        VSPHERE => {
            translate_key(volume, zone, "topology.csi.vmware.com/zone", None);
            translate_key(volume, region, "topology.csi.vmware.com/region", None);
            return;
        }
        _ => return,
    }
    // Newer nodes have only the newer label.
    if region == OLD_REGION && requires(volume, region) {
        rename(volume, region, REGION);
    }
}

/// Returns the generation of topology labels that the volume uses.
fn topology_keys(volume: &api::PersistentVolume) -> (&'static str, &'static str) {
    let (new, old) = ((ZONE, REGION), (OLD_ZONE, OLD_REGION));
    let is_required = |key: &str| requirements(volume).any(|one| one.key == key);
    let is_older = !is_required(ZONE)
        && (is_required(OLD_ZONE) || (label(volume, ZONE).is_none() && label(volume, OLD_ZONE).is_some()));
    if is_older { old } else { new }
}

/// Replaces `key` by the driver's key in the affinity; without such affinity, adds it from the label.
fn translate_key(volume: &mut api::PersistentVolume, key: &str, to: &str, between: Option<&str>) {
    if requires(volume, key) {
        return rename(volume, key, to);
    }
    let Some(value) = label(volume, key) else { return };
    let values = between.map_or_else(|| vec![value], |between| value.split(between).collect());
    let values: BTreeSet<&str> = values.into_iter().map(str::trim).filter(|value| !value.is_empty()).collect();
    let values: Vec<String> = values.into_iter().map(str::to_owned).collect();
    if values.is_empty() {
        return;
    }
    let requirement =
        api::NodeSelectorRequirement { key: to.to_owned(), operator: "In".to_owned(), values: Some(values) };
    let terms = terms(volume);
    if terms.is_empty() {
        terms.push(api::NodeSelectorTerm::default());
    }
    for term in terms {
        term.match_expressions.get_or_insert_default().push(requirement.clone());
    }
}

fn terms(volume: &mut api::PersistentVolume) -> &mut Vec<api::NodeSelectorTerm> {
    let affinity = volume.spec.get_or_insert_default().node_affinity.get_or_insert_default();
    &mut affinity.required.get_or_insert_default().node_selector_terms
}

fn requirements(volume: &api::PersistentVolume) -> impl Iterator<Item = &api::NodeSelectorRequirement> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let terms = affinity.and_then(|affinity| affinity.required.as_ref()).map(|required| &required.node_selector_terms);
    terms.into_iter().flatten().filter_map(|term| term.match_expressions.as_ref()).flatten()
}

/// Whether the affinity requires any value for `key`.
fn requires(volume: &api::PersistentVolume, key: &str) -> bool {
    requirements(volume).any(|one| one.key == key && one.values.as_ref().is_some_and(|values| !values.is_empty()))
}

fn rename(volume: &mut api::PersistentVolume, key: &str, to: &str) {
    let expressions = terms(volume).iter_mut().filter_map(|term| term.match_expressions.as_mut()).flatten();
    for one in expressions.filter(|one| one.key == key) {
        to.clone_into(&mut one.key);
    }
}
