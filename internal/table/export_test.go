package table

// MostHoles is mostHoles.
var MostHoles = &mostHoles
